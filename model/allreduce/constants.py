"""The physical constants of all-reduce time, with unit, prior and source.

Priors hold for any PCIe or NVLink host; ``ConstantSpec.prior_log_sd`` says how far a host may be
off. None is fitted to the data that the bars are measured on, but where an exact figure exists
nowhere it is judged, and wide.
"""

from math import inf

from model.fit import ConstantSpec

_NCCL = "NVIDIA/nccl 2.27-2.30 tuning table"
_NOTES = "rtx6kpro community measurements"
_JUDGED = "judged, wide"
PREFIX = "allreduce."


def _spec(
    name: str, unit: str, prior: float, log_sd: float, source: str, most: float = inf
) -> ConstantSpec:
    return ConstantSpec(PREFIX + name, unit, prior, log_sd, source, most)


NCCL_SPECS = (
    _spec("fixed_us", "us per captured collective", 4.0, 0.35,
          f"{_NOTES}: 3.3 us (8 GPUs, by hops), 3-4 us in a graph"),
    _spec("channel_us", "us per channel after the first", 0.08, 1.0,
          "one more block to start, its connections to read and to poll; judged, wide"),
    _spec("simple_fixed_us", "us more per Simple collective", 6.0, 0.6,
          f"{_NCCL}: 11.2 us more than LL over PCIe with 2 hops (base 1.8, 4.7 a hop); 8 x RTX "
          "5090 on EPYC Turin (nccl-tests): 11.7 us more with 14 hops, so that most is not by hop"),
    _spec("handoff_nvlink_us", "us per hop beside the path", 0.4, 0.5, f"{_NCCL}: 0.6 us a step"),
    _spec("handoff_p2p_us", "us per hop beside the path", 0.5, 0.5,
          f"{_NOTES}: 1.0-1.5 us per LL hop, 0.65-1.07 us of it the path"),
    _spec("handoff_shm_us", "us per hop beside the path", 1.0, 0.8,
          "a reader polls host memory over PCIe, half a round trip on average, more in a guest; "
          "judged, wide"),
    _spec("ll128_hop", "x the LL hop", 1.5, 0.3,
          "between LL and Simple, as Demystifying NCCL (arXiv 2507.04786) orders them"),
    _spec("simple_hop", "x the LL hop", 1.3, 0.25,
          "what the two sources of simple_fixed_us leave for 14 hops, 0.3 us each"),
    _spec("simple_host_crossings", "x the path, more per Simple hop through host memory", 2.0, 0.5,
          "the fence before the tail and the read of the data after it, each a round trip; in peer "
          "memory both are local"),
    _spec("burst", "x the hop, for a full first pass", 0.3, 0.6, _JUDGED),
    _spec("occupancy", "of the hand-over, in which a rank can do nothing else", 0.4, 0.12, _JUDGED,
          most=1.0),
    _spec("corner", "exponent: 1 channel and link times add, large the longer counts", 2.0, 0.3,
          _JUDGED),
    _spec("cut_through", "of a stream that arrives before it is passed on", 0.6, 0.5,
          "LL passes on line by line, Simple half a chunk at a time; judged", most=1.0),
    *(
        _spec(f"{proto}_scaling", "exponent of channels: 1 each adds its full rate", prior, log_sd,
              "channels share SM issue and link queues; judged", most=1.0)
        for proto, prior, log_sd in (("ll", 0.85, 0.3), ("ll128", 0.85, 0.3), ("simple", 0.8, 0.35))
    ),
    _spec("channel_nvlink_gb_per_s", "GB/s per LL channel, payload", 5.0, 0.4,
          "4 KiB per pass (512 threads x 8 B) and 0.8 us"),
    _spec("channel_p2p_gb_per_s", "GB/s per LL channel, payload", 4.0, 0.4,
          "4 KiB per pass (512 threads x 8 B) and 1 us"),
    _spec("channel_shm_gb_per_s", "GB/s per LL channel, payload", 2.8, 0.4,
          "4 KiB per pass and 1.5 us: a read round trip to host memory"),
    _spec("ll128_rate", "x the LL channel", 1.84, 0.35, f"{_NCCL}: 0.92 against 0.5 of the bus"),
    _spec("simple_rate", "x the LL channel", 5.0, 0.5,
          "32 KiB per pass (512 threads x 64 B) against 4 KiB, longer passes; judged"),
    _spec("link_nvlink", "of the link rate", 0.85, 0.15, _JUDGED, most=1.0),
    _spec("link_p2p", "of the link rate", 0.80, 0.25, f"{_NOTES}: 43-46 of 55 GB/s bus plateau",
          most=1.0),
    _spec("link_shm", "of the link rate", 0.70, 0.3, f"{_NOTES}: SHM-style copies 43 of 56 GB/s",
          most=1.0),
    _spec("socket_gb_per_s", "GB/s of wire per flow through the other socket's memory", 25.0, 1.1,
          f"{_NCCL}: 10-40 GB/s by CPU; {_NOTES}: copies at 43 GB/s on EPYC Turin, 5 GB/s a GPU "
          "where the path between sockets saturates"),
    _spec("host_cache_mib", "MiB of host memory in flight before it slows", 48.0, 1.2,
          "last-level cache that I/O may allocate, by CPU; judged"),
    _spec("spill", "x the host path's time added beyond the cache", 0.7, 0.8, _JUDGED),
)  # fmt: skip
DIRECT_SPECS = (
    _spec("direct_fixed_us", "us per captured one-shot kernel", 3.0, 0.4,
          f"{_NOTES}: 7.5 us at 1 KiB on 8 GPUs; SGLang 4.5 us on 2"),
    _spec("direct_read", "of the link rate", 0.55, 0.4, f"{_NOTES}: 29 of 55 GB/s into each GPU",
          most=1.0),
)  # fmt: skip
GLOO_SPECS = (
    _spec("gloo_fixed_us", "us per call", 40.0, 0.6, _JUDGED),
    _spec("gloo_hop_us", "us per hop over a local socket", 20.0, 0.6,
          "two context switches and a loopback message; judged"),
    _spec("gloo_gb_per_s", "GB/s per hop", 1.5, 0.6, "loopback copies of one core; judged"),
)  # fmt: skip
EAGER_SPECS = (
    _spec("call_us", "us between eager calls, host-bound", 30.0, 0.5,
          "aiconfigurator-core 0.12.0 eager rows: 18-40 us; judged"),
)  # fmt: skip
ALL_SPECS = NCCL_SPECS + DIRECT_SPECS + GLOO_SPECS + EAGER_SPECS
#: physical limits by name, of those that have one
MOST = {spec.name: spec.most for spec in ALL_SPECS if spec.most < inf}

"""Reads ``nvidia-smi -q -x`` (drivers 450 to 590): what the driver says of each GPU.

Element names changed over the years (``clocks_throttle_reasons`` became ``clocks_event_reasons``,
``power_readings`` became ``gpu_power_readings``); all forms are read. A value that is N/A is None.
"""

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast
from xml.etree.ElementTree import Element, ParseError, XMLPullParser

from autotune.doctor.lspci import GENERATIONS, LinkRate, full_address

_NUMBER = re.compile(r"^-?\d+(?:\.\d+)?")
_REASON_PREFIXES = ("clocks_event_reason_", "clocks_throttle_reason_")


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that holds memory of a GPU. ``kind``: C compute, G graphics, C+G both."""

    pid: int
    name: str
    kind: str
    used_mib: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SmiGpu:
    """One GPU as the driver sees it; None where it answers N/A."""

    index: int
    address: str
    name: str
    uuid: str
    persistence: bool | None
    #: "HMM", "ATS" or "None"
    addressing_mode: str | None
    #: 0 (fastest) to 15
    pstate: int | None
    link: LinkRate | None
    link_max: LinkRate | None
    #: of the card alone, and of the port it sits in
    gen_max_device: int | None
    gen_max_host: int | None
    replays: float | None
    bar1_mib: float | None
    memory_mib: float | None
    memory_used_mib: float | None
    power_limit_w: float | None
    power_default_w: float | None
    temperature_c: float | None
    #: names of active reasons without their prefix: "sw_power_cap"; None when not shown
    reasons: tuple[str, ...] | None
    #: None when the driver does not list processes
    processes: tuple[GpuProcess, ...] | None
    mig: bool | None
    compute_mode: str | None
    uncorrectable_errors: float | None
    remap_pending: bool | None
    virtualization: str | None

    @property
    def title(self) -> str:
        """For a finding."""
        return f"GPU {self.index} ({self.address})"

    @property
    def idle(self) -> bool | None:
        """Whether it is in a power-saving state, in which the link slows down on purpose."""
        if self.reasons is not None and "gpu_idle" in self.reasons:
            return True
        return None if self.pstate is None else self.pstate >= 5


@dataclass(frozen=True, slots=True)
class SmiLog:
    """The whole answer. ``attached`` may be above ``len(gpus)`` when the text is cut."""

    driver: str | None
    #: newest CUDA that the driver runs, as "13.0"
    cuda: str | None
    attached: int | None
    gpus: tuple[SmiGpu, ...]
    cut: bool


def parse_smi(text: str) -> SmiLog:
    """Read the XML; a text that ends early gives the GPUs that are whole.

    Raises ``ValueError`` when it is no nvidia-smi XML at all.
    """
    start = text.find("<?xml")
    if start < 0:
        start = text.find("<nvidia_smi_log")
    if start < 0:
        first = next((line.strip() for line in text.splitlines() if line.strip()), "nothing")
        raise ValueError(f"no nvidia-smi XML; it begins with {first[:80]!r}")
    parser: XMLPullParser[Element] = XMLPullParser(events=("end",))
    tops: dict[str, str] = {}
    gpus: list[SmiGpu] = []
    cut = False
    try:
        parser.feed(text[start:].rstrip() + "\n")
        parser.close()
    except ParseError:
        cut = True
    for element in _elements(parser):
        if element.tag == "gpu":
            gpus.append(_gpu(len(gpus), element))
        elif element.tag in ("driver_version", "cuda_version", "attached_gpus"):
            tops.setdefault(element.tag, (element.text or "").strip())
    attached = _number(tops.get("attached_gpus"))
    return SmiLog(
        driver=_text(tops.get("driver_version")),
        cuda=_text(tops.get("cuda_version")),
        attached=None if attached is None else int(attached),
        gpus=tuple(gpus),
        cut=cut,
    )


def _elements(parser: "XMLPullParser[Element]") -> Iterator[Element]:
    """Elements that were closed before the text ended."""
    events = cast("Iterator[tuple[str, Element]]", parser.read_events())
    # the last event of a broken text is the break itself, raised
    with contextlib.suppress(ParseError):
        for _, element in events:
            yield element


def _gpu(index: int, gpu: Element) -> SmiGpu:
    def get(*paths: str) -> str | None:
        for path in paths:
            found = _text(gpu.findtext(path))
            if found is not None:
                return found
        return None

    def number(*paths: str) -> float | None:
        return next((n for p in paths if (n := _number(gpu.findtext(p))) is not None), None)

    info = "pci/pci_gpu_link_info"
    pstate = get("performance_state")
    power = ("gpu_power_readings", "power_readings")
    return SmiGpu(
        index=index,
        address=_address(get("pci/pci_bus_id") or gpu.get("id") or ""),
        name=get("product_name") or "unknown GPU",
        uuid=get("uuid") or "",
        persistence=_switch(get("persistence_mode")),
        addressing_mode=_addressing(gpu.findtext("addressing_mode")),
        pstate=int(pstate[1:]) if pstate and pstate[1:].isdigit() else None,
        link=_link(
            number(f"{info}/pcie_gen/current_link_gen"),
            number(f"{info}/link_widths/current_link_width"),
        ),
        link_max=_link(
            number(f"{info}/pcie_gen/max_link_gen"),
            number(f"{info}/link_widths/max_link_width"),
        ),
        gen_max_device=_whole(number(f"{info}/pcie_gen/max_device_link_gen")),
        gen_max_host=_whole(number(f"{info}/pcie_gen/max_host_link_gen")),
        replays=number("pci/replay_counter"),
        bar1_mib=number("bar1_memory_usage/total"),
        memory_mib=number("fb_memory_usage/total"),
        memory_used_mib=number("fb_memory_usage/used"),
        power_limit_w=number(
            *(f"{p}/{n}" for p in power for n in ("current_power_limit", "power_limit"))
        ),
        power_default_w=number(*(f"{p}/default_power_limit" for p in power)),
        temperature_c=number("temperature/gpu_temp"),
        reasons=_reasons(gpu),
        processes=_processes(gpu.find("processes")),
        mig=_switch(get("mig_mode/current_mig")),
        compute_mode=get("compute_mode"),
        uncorrectable_errors=number(
            "ecc_errors/volatile/dram_uncorrectable",
            "ecc_errors/volatile/double_bit/total",
        ),
        remap_pending=_yes(get("remapped_rows/remapped_row_pending")),
        virtualization=get("gpu_virtualization_mode/virtualization_mode"),
    )


def _reasons(gpu: Element) -> tuple[str, ...] | None:
    for tag in ("clocks_event_reasons", "clocks_throttle_reasons"):
        block = gpu.find(tag)
        if block is None:
            continue
        names = []
        for child in block:
            name = child.tag
            for prefix in _REASON_PREFIXES:
                name = name.removeprefix(prefix)
            if (child.text or "").strip() == "Active":
                names.append(name)
        return tuple(names)
    return None


def _processes(block: Element | None) -> tuple[GpuProcess, ...] | None:
    if block is None or (_text(block.text) is None and (block.text or "").strip()):
        return None
    found = []
    for item in block.findall("process_info"):
        pid = _number(item.findtext("pid"))
        if pid is not None:
            found.append(
                GpuProcess(
                    int(pid),
                    _text(item.findtext("process_name")) or "unknown",
                    _text(item.findtext("type")) or "C",
                    _number(item.findtext("used_memory")),
                )
            )
    return tuple(found)


def _address(text: str) -> str:
    """The full PCI address; other texts (a UUID as id) stay as they are."""
    parts = re.fullmatch(r"(?:[0-9A-Fa-f]{4,8}:)?[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7]", text)
    return full_address(text) if parts else text or "address not shown"


def _link(gen: float | None, width: float | None) -> LinkRate | None:
    # some virtualised drivers answer 0
    if gen is None or width is None or int(gen) not in GENERATIONS.values():
        return None
    return LinkRate(int(gen), int(width))


def _addressing(text: str | None) -> str | None:
    """ "None" is a value here, not an absence."""
    text = (text or "").strip()
    return text if text in ("None", "HMM", "ATS") else None


def _text(text: str | None) -> str | None:
    """The text, or None for every way in which nvidia-smi says that it has no value."""
    text = (text or "").strip()
    empty = ("", "N/A", "[N/A]", "None", "Not Supported", "[Not Supported]", "Not Available")
    if text in empty or "Unknown Error" in text or text == "ERR!" or "deprecated" in text:
        return None
    return text


def _number(text: str | None) -> float | None:
    clean = _text(text)
    found = _NUMBER.match(clean) if clean else None
    return float(found.group()) if found else None


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def _switch(text: str | None) -> bool | None:
    return {"Enabled": True, "Disabled": False}.get(text or "")


def _yes(text: str | None) -> bool | None:
    return {"Yes": True, "No": False}.get(text or "")

"""Names of the variables that NCCL reads, by the release that first knew them.

A name that is not here is read by nobody: NCCL ignores it without a word. Source: NVIDIA/nccl, tags
2.18.1 to 2.30.7, names of parameters and of ``getenv`` calls (names only).
"""

from difflib import get_close_matches

#: release -> names, without NCCL_; those of 2.18 may be older
_SINCE = {
    "2.18": """
        AGG_CHANNEL_SIZE ALGO ALLOC_P2P_NET_LL_BUFFERS BUFFSIZE CGA_CLUSTER_SIZE
        CHECK_POINTERS CHUNK_SIZE COLLNET_ENABLE COLLNET_NODE_THRESHOLD COMM_BLOCKING
        COMM_ID COMM_SPLIT_SHARE_RESOURCES CREATE_THREAD_CONTEXT CROSS_NIC CUDA_PATH
        CUMEM_ENABLE DEBUG DEBUG_FILE DEBUG_SUBSYS DMABUF_ENABLE GDRCOPY_ENABLE
        GDRCOPY_FIFO_ENABLE GDRCOPY_FLUSH_ENABLE GDRCOPY_SYNC_ENABLE GDR_FLUSH_DISABLE
        GRAPH_DUMP_FILE GRAPH_DUMP_FILE_RANK GRAPH_FILE GRAPH_HELPER_DISABLE
        GRAPH_MIXING_SUPPORT GRAPH_REGISTER GROUP_CUDA_STREAM HOSTID IB_ADAPTIVE_ROUTING
        IB_AR_THRESHOLD IB_DISABLE IB_GID_INDEX IB_HCA IB_MERGE_VFS IB_PCI_RELAXED_ORDERING
        IB_PKEY IB_QPS_PER_CONNECTION IB_RETRY_CNT IB_SL IB_SPLIT_DATA_ON_QPS IB_TC
        IB_TIMEOUT IB_USE_INLINE IGNORE_CPU_AFFINITY IGNORE_DISABLED_P2P
        L1_SHARED_MEMORY_CARVEOUT LAUNCH_MODE LL128_BUFFSIZE LL128_NTHREADS LL_BUFFSIZE
        MAX_CTAS MAX_NCHANNELS MAX_NRINGS MAX_P2P_NCHANNELS MEM_SYNC_DOMAIN MIN_CTAS
        MIN_NCHANNELS MIN_NRINGS MIN_P2P_NCHANNELS NCHANNELS_PER_NET_PEER NET
        NET_DISABLE_INTRA NET_FORCE_FLUSH NET_GDR_LEVEL NET_GDR_READ NET_OVERHEAD NET_PLUGIN
        NET_SHARED_BUFFERS NET_SHARED_COMMS NSOCKS_PERTHREAD NTHREADS NVB_DISABLE
        NVB_PRECONNECT NVLS_ENABLE NVLS_NCHANNELS P2P_DIRECT_DISABLE P2P_DISABLE P2P_LEVEL
        P2P_LL_THRESHOLD P2P_NET_CHUNKSIZE P2P_NVL_CHUNKSIZE P2P_PCI_CHUNKSIZE P2P_PXN_LEVEL
        P2P_READ_ENABLE P2P_USE_CUDA_MEMCPY PROGRESS_APPENDOP_FREQ PROTO
        PROXY_APPEND_BATCH_SIZE PROXY_DUMP_SIGNAL PROXY_PROFILE PXN_DISABLE SET_STACK_SIZE
        SET_THREAD_NAME SHM_DISABLE SHM_LOCALITY SHM_MEMCPY_MODE SHM_USE_CUDA_MEMCPY
        SOCKET_FAMILY SOCKET_IFNAME SOCKET_NTHREADS THREAD_THRESHOLDS TOPO_DUMP_FILE
        TOPO_DUMP_FILE_RANK TOPO_FILE WORK_FIFO_DEPTH
    """,
    "2.19": """
        LOCAL_REGISTER TUNER_PLUGIN
    """,
    "2.20": """
        CONNECT_ROUND_MAX_PEERS IB_MERGE_NICS MNNVL NVLSTREE_MAX_CHUNKSIZE
        REPORT_CONNECT_PROGRESS WARN_ENABLE_DEBUG_INFO
    """,
    "2.21": """
        IB_ADDR_FAMILY IB_ADDR_RANGE IB_ROCE_VERSION_NUM MNNVL_ENABLE NVLS_CHUNKSIZE
    """,
    "2.22": """
        IB_FIFO_TC IB_ROUTABLE_FLID_GID_INDEX RUNTIME_CONNECT UNPACK_DOUBLE_NCHANNELS
        WORK_ARGS_BYTES WORK_FIFO_BYTES
    """,
    "2.23": """
        CONF_FILE CUMEM_HOST_ENABLE IB_ECE_ENABLE IB_RETURN_ASYNC_EVENTS MNNVL_CLIQUE_ID
        OOB_NET_ENABLE OOB_NET_IFNAME PAT_ENABLE PROFILER_PLUGIN UID_STAGGER_RATE
        UID_STAGGER_THRESHOLD
    """,
    "2.24": """
        IB_MQP_RETRY_ALL IB_MQP_RETRY_CNT IB_MQP_RETRY_SLEEP_MSEC IB_WARN_RAIL_LOCAL
        LEGACY_CUDA_REGISTER NET_FORCE_MERGE NET_MERGE_LEVEL NET_OPTIONAL_RECV_COMPLETION
        RAS_ADDR RAS_ENABLE RAS_TIMEOUT_FACTOR SOCKET_RETRY_CNT SOCKET_RETRY_SLEEP_MSEC
    """,
    "2.25": """
        MNNVL_UUID
    """,
    "2.26": """
        DEBUG_TIMESTAMP_FORMAT DEBUG_TIMESTAMP_LEVELS LAUNCH_ORDER_IMPLICIT
        LAUNCH_RACE_FATAL NET_GDR_C2C NET_PLUGIN_REF_COUNT
    """,
    "2.27": """
        COMM_SHRINK_SHARE_RESOURCES CTA_POLICY IB_DATA_DIRECT LL128_C2C
        MNNVL_SCATTER_NETS_ENABLE NVLINK_UTIL_CENTRIC_SCHED_ENABLE PXN_C2C SOCKET_INLINE
        SOCKET_MIN_TASKSIZE SOCKET_RCVBUF SOCKET_SNDBUF SYM_CTAS SYM_KERNEL WIN_ENABLE
        WIN_STRIDE
    """,
    "2.28": """
        ENV_PLUGIN GIN_COUNTER_POOL_SIZE GIN_ENABLE GIN_ERROR_QUERY_SEC
        GIN_GDAKI_NIC_HANDLER GIN_GDAKI_QP_DEPTH GIN_NCONTEXTS GIN_PROXY_QUEUE_SIZE
        GIN_SIGNAL_POOL_SIZE GIN_TYPE MNNVL_RAIL_PER_HOST NETDEVS_POLICY NVTX_DISABLE
        P2P_SCHEDULE_GROUP_SIZE PROXY_CPUSET SET_CPU_STACK_SIZE SINGLE_PROC_MEM_REG_ENABLE
    """,
    "2.29": """
        ALLGATHERV_ENABLE CHECK_MODE DISABLE_MEM_MANAGER ENABLE_VERSION_CHECK
        GDAKI_USE_RELIABLE_DB GIN_EXCLUSIVE_CONTEXTS GIN_NCONNECTIONS GIN_PLUGIN
        GIN_PLUGIN_REF_COUNT IB_DEVICE_PCI_ORDER IB_PREPOST_RECEIVE_WORK_REQUESTS
        IB_RECEIVER_SIDE_MATCHING_SCHEME IB_RESILIENCY_PORT_FAILOVER
        IB_RESILIENCY_PORT_FAILOVER_MAX_ATTEMPTS IB_RESILIENCY_PORT_FAILOVER_PROBE_DELAY
        IPC_USE_ABSTRACT_SOCKET LSA_TEAM_SIZE MULTI_SEGMENT_REGISTER NO_CACHE NUM_RMA_CTX
        P2P_EPOCH_ENABLE P2P_PER_CHANNEL_NET_BW RMA_PROXY_DUMP_SIGNAL RMA_PROXY_QUEUE_SIZE
        SOCKET_POLL_TIMEOUT_MSEC SYM_CE_THRESHOLD SYM_GIN_KERNELS_ENABLE SYM_NOWIN_ENABLE
    """,
    "2.30": """
        DEV_API_JIT ELASTIC_BUFFER_REGISTER GIN_GDAKI_MAX_DEST_RD_ATOMIC
        GIN_GDAKI_MAX_QP_RD_ATOMIC GIN_IB_TC GRAPH_STREAM_ORDERING IBVERBS_LIB IB_OOO_RQ
        IB_QUERY_PORT_SPEED IB_RESILIENCY_PORT_RECOVERY
        IB_RESILIENCY_PORT_RECOVERY_ACK_TIMEOUT
        IB_RESILIENCY_PORT_RECOVERY_ALIVE_MSG_BATCH_INTERVAL
        IB_RESILIENCY_PORT_RECOVERY_ALIVE_MSG_BATCH_SIZE
        IB_RESILIENCY_PORT_RECOVERY_ALIVE_MSG_SEQUENCE_SIZE
        IB_RESILIENCY_PORT_RECOVERY_ALIVE_MSG_TIMEOUT
        IB_RESILIENCY_PORT_RECOVERY_ATTEMPTS_MAX IB_RESILIENCY_PORT_RECOVERY_START_DELAY
        IB_SUBNET_AWARE_ROUTING IB_SUBNET_PREFIX_LEN IGNORE_COLLNET_MISMATCH
        IGNORE_NET_MISMATCH MLOPART_RDMA_ENABLE MNNVL_CROSS_CLIQUE MULTI_RANK_GPU_ENABLE
        NET_GDR_MLOPART NET_MERGE_POLICY P2P_MAX_PEERS RMA_DISABLE RMA_PLUGIN
        RMA_PLUGIN_REF_COUNT SHADOW_MEMPOOL_MAX_SIZE SOCKET_MAGIC SYM_REUSE_SYSMEM_HANDLES
        SYM_RS_GIN_CHUNK_SIZE SYM_TMA_ENABLE TOPO_SPLIT_MLOPART
    """,
}
#: names without NCCL_ that are gone, with the last release that had them and what to use now
_GONE = {
    "AGG_CHANNEL_SIZE": ("2.19", ""),
    "CUDA_PATH": ("2.20", ""),
    "WORK_FIFO_DEPTH": ("2.21", "NCCL_WORK_FIFO_BYTES"),
    "PROXY_PROFILE": ("2.22", "NCCL_PROFILER_PLUGIN"),
    "MNNVL": ("2.20", "NCCL_MNNVL_ENABLE"),
    "SHM_USE_CUDA_MEMCPY": ("2.29", ""),
    "SHM_MEMCPY_MODE": ("2.29", ""),
    "CREATE_THREAD_CONTEXT": ("2.29", ""),
    "RINGS": ("2.4", "NCCL_GRAPH_FILE"),
    "TREE_THRESHOLD": ("2.4", "NCCL_ALGO"),
    "LL_THRESHOLD": ("2.4", "NCCL_PROTO"),
    "CHECKS_DISABLE": ("2.2", "NCCL_CHECK_POINTERS"),
    "IB_CUDA_SUPPORT": ("2.3", "NCCL_NET_GDR_LEVEL"),
}
#: names without NCCL_ that PyTorch or a plugin reads, by their beginning
_OTHERS = {
    "ASYNC_ERROR_HANDLING": "PyTorch's (now TORCH_NCCL_ASYNC_ERROR_HANDLING)",
    "BLOCKING_WAIT": "PyTorch's (now TORCH_NCCL_BLOCKING_WAIT)",
    "DESYNC_DEBUG": "PyTorch's (now TORCH_NCCL_DESYNC_DEBUG)",
    "ENABLE_TIMING": "PyTorch's (now TORCH_NCCL_ENABLE_TIMING)",
    "INSPECTOR_": "the inspector profiler plugin's",
    "PROFILE_": "a profiler plugin's",
    "FASTRAK_": "a network plugin's",
    "TUNER_CONFIG_": "a tuner plugin's",
    "VERSION": "a mark of the container image",
    "HOME": "read by build tools",
    "ROOT": "read by build tools",
    "LIB_DIR": "read by build tools",
    "INCLUDE_DIR": "read by build tools",
}
#: the newest release that was read
NEWEST = (2, 30)
#: name -> release that first knew it
SINCE: dict[str, tuple[int, int]] = {
    f"NCCL_{name}": (int(release.split(".")[0]), int(release.split(".")[1]))
    for release, names in _SINCE.items()
    for name in names.split()
}


def unread_because(name: str, version: str | None) -> str | None:
    """Why the NCCL of ``version`` ("2.28.9+cuda13.0") never reads a variable; None if it may.

    One clause. Names that belong to PyTorch or to plugins are not judged here (``owner_of``).
    """
    short = name.removeprefix("NCCL_")
    release = _release(version)
    shown = f"NCCL {release[0]}.{release[1]}" if release else "NCCL"
    if short in _GONE:
        last, instead = _GONE[short]
        numbers = tuple(map(int, last.split(".")))
        if (release or (2, 30)) > numbers:
            return f"{name} went out of NCCL after {last}" + (f": use {instead}" if instead else "")
        return None
    if name in SINCE:
        first = SINCE[name]
        if release is not None and release < first:
            return f"{name} came with NCCL {first[0]}.{first[1]}, this is {shown}"
        return None
    if owner_of(name) is not None:
        return None
    if release is not None and release > NEWEST:
        # a newer release may know more names
        return None
    near = nearest(name)
    return f"{shown} has no variable {name}" + (f"; did you mean {near}?" if near else "")


def nearest(name: str) -> str | None:
    """The variable that a misspelt name means, or None."""
    known = {variable.removeprefix("NCCL_"): variable for variable in SINCE}
    short = name.upper().removeprefix("NCCL_")
    close = get_close_matches(short, known, n=1, cutoff=0.7)
    # NCCL_ALGORITHM, NCCL_PROTOCOLS
    begins = [n for n in known if len(n) >= 4 and short.startswith(n)]
    found = close or sorted(begins, key=len)[-1:]
    return known[found[0]] if found else None


def owner_of(name: str) -> str | None:
    """Who reads a name that NCCL itself does not, in words; None where nobody is known."""
    short = name.removeprefix("NCCL_")
    if name in SINCE:
        return None
    return next((whose for start, whose in _OTHERS.items() if short.startswith(start)), None)


def _release(version: str | None) -> tuple[int, int] | None:
    parts = (version or "").split(".")
    if len(parts) < 2 or not all(part.isdigit() for part in parts[:2]):
        return None
    return int(parts[0]), int(parts[1])

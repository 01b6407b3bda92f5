"""Exceptions that come from the machine, the installation or the compiler. The texts are PyTorch's and NCCL's."""

from __future__ import annotations

from typing import Final

from titan_tune.titan.signs.failure import failure

_LESS_MEMORY: Final = "lower training.local_batch_size, checkpoint more, or shard over more ranks"

MEMORY: Final = (
    failure(
        "host-out-of-memory",
        r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory).*?allocate (?P<asked>\d+) bytes"
        r"|^MemoryError|Cannot allocate memory",
        "the machine's memory is used up",
        "this is RAM, not GPU memory: use fewer processes a node, smaller batches, or more memory",
    ),
    failure(
        "cuda-out-of-memory-outside-allocator",
        r"(?:CUDA|HIP) error: out of memory",
        "the driver has no GPU memory left, outside PyTorch's allocator",
        "end what else uses the card (nvidia-smi), or leave room for contexts and NCCL: " + _LESS_MEMORY,
    ),
)

COLLECTIVES: Final = (
    failure(
        "nccl-duplicate-gpu",
        r"Duplicate GPU detected",
        "two ranks use the same GPU",
        "start as many processes as the node has GPUs (--nproc_per_node) and check CUDA_VISIBLE_DEVICES",
    ),
    failure(
        "shared-memory-full",
        r"shared memory segment /dev/shm|unable to (?:mmap|allocate shared memory)|insufficient shared memory",
        "/dev/shm is full",
        "enlarge it (docker run --shm-size=16g, or an emptyDir of medium Memory)",
    ),
    failure(
        "rendezvous-port-in-use",
        r"EADDRINUSE|[Aa]ddress already in use",
        "the rendezvous port is taken",
        "end the run that holds it, or use torchrun --standalone or another --rdzv-endpoint port",
    ),
    failure(
        "rendezvous-failed",
        r"client socket has timed out|RendezvousTimeoutError|RendezvousConnectionError|"
        r"Name or service not known|No route to host",
        "the ranks did not find each other",
        "check that --rdzv-endpoint names a host that every node resolves, that the port is open, and that "
        "all nodes were started",
    ),
    failure(
        "collective-timeout",
        r"Watchdog caught collective operation timeout|Timed out waiting (?P<waited>\d+)ms|"
        r"watchdog got stuck|wait timeout after \d+ms",
        "a collective timed out: one rank did not arrive",
        "look for the rank that stopped first; its last line says where",
    ),
    failure(
        "fake-backend-limit",
        r"Backend fake does not yet support",
        "comm.mode = fake_backend cannot do this: a limit of the tool, not of the configuration",
        "run it on real ranks",
    ),
    failure(
        "lost-peer",
        r"Connection (?:closed by peer|reset by peer)|Broken pipe|recvValue failed|recvVector failed|"
        r"ncclRemoteError|communicator was aborted|Socket (?:Timeout|closed)|failed to recv",
        "the connection to another rank broke",
        "that rank ended first: look in its log",
        is_fallout=True,
    ),
    failure(
        "nccl-error",
        r"nccl(?P<kind>SystemError|UnhandledCudaError|InternalError|InvalidUsage|InvalidArgument)|"
        r"NCCL error in:",
        "NCCL failed",
        "run it again with NCCL_DEBUG=INFO: the line before the error names the call",
    ),
)

DEVICE: Final = (
    failure(
        "no-gpu",
        r"No CUDA GPUs are available|Found no NVIDIA driver|no CUDA-capable device|Torch not compiled with CUDA",
        "PyTorch finds no GPU",
        "titan-tune doctor says why (driver, CUDA_VISIBLE_DEVICES, a CPU build of torch)",
    ),
    failure(
        "gpu-without-kernels",
        r"no kernel image is available",
        "this build of PyTorch has no kernels for the GPU",
        "install a PyTorch whose torch.cuda.get_arch_list() has the GPU's compute capability",
    ),
    failure(
        "gpu-fault",
        r"CUDA error: (?P<fault>an illegal memory access|unspecified launch failure|uncorrectable ECC error|"
        r"device-side assert triggered|misaligned address|the launch timed out)",
        "the GPU stopped with: {fault}",
        "run it again: a card that repeats it is broken (dmesg shows its Xid); if another card repeats it, "
        "CUDA_LAUNCH_BLOCKING=1 names the kernel",
    ),
)

COMPILER: Final = (
    failure(
        "recompile-limit",
        r"FailOnRecompileLimitHit|recompile limit exceeded",
        "torch.compile recompiled a block too often, and with fullgraph=True that is an error",
        "TORCH_LOGS=recompiles names the guard that failed; keep shapes static (training.seq_len, batch), or "
        "raise torch._dynamo.config.recompile_limit",
    ),
    failure(
        "no-cxx-compiler",
        r"InvalidCxxCompiler|No working C\+\+ compiler found|Failed to find C compiler",
        "torch.compile found no C++ compiler",
        "install g++, or set CXX to one, or set compile.enable = false",
    ),
    failure(
        "no-python-headers",
        r"Python\.h: No such file",
        "torch.compile cannot build: Python's headers are missing",
        "install them (python3-dev)",
    ),
    failure(
        "no-triton",
        r"Cannot find a working triton installation|TritonMissing|No module named 'triton'",
        "triton is not installed or does not work",
        "install the triton that this torch names (pip show torch); a CPU-only torch needs: pip install triton",
    ),
    failure(
        "triton-cache-race",
        r"FileNotFoundError: .*(?:triton|torchinductor)",
        "a file of the compile cache vanished: ranks share one cache folder",
        "give each rank its own (TRITON_CACHE_DIR, TORCHINDUCTOR_CACHE_DIR) and run it again; titan-tune's "
        "probes do",
    ),
    failure(
        "triton-out-of-resources",
        r"OutOfResources|out of resource: ",
        "a triton kernel needs more shared memory than the GPU has",
        "use compile mode default instead of max-autotune",
    ),
    failure(
        "checkpoint-recompute-mismatch",
        r"torch\.utils\.checkpoint: (?:Recomputed values|A different number of tensors|trying to save more)",
        "activation checkpointing recomputed something else than it had computed",
        'with MoE layers routing is not repeatable: use selective_ac_option = "op", which saves it; with '
        "torch.compile set compile.enable = false or activation_checkpoint.mode = none",
    ),
    failure(
        "graph-break",
        r"torch\._dynamo\.exc\.Unsupported",
        "torch.compile met code it cannot trace, and with fullgraph=True that is an error",
        "set compile.enable = false, or take the operation out of the block",
    ),
    failure(
        "compile-failed",
        r"InductorError|BackendCompilerFailed|torch\._dynamo\.exc\.|LoweringException|TritonCompilationError|"
        r"CompilationError",
        "torch.compile failed",
        "set compile.enable = false to see whether it is the compiler; the message names the operation",
    ),
)

SETUP: Final = (
    failure(
        "cpu-attention",
        r"FlexAttention does not support backward on CPU",
        "flex attention cannot train on CPU",
        "use a flavor with sdpa attention on CPU",
    ),
    failure(
        "unknown-key",
        r"Invalid field names in .*? data: \{(?P<keys>.*?)\}",
        "the job file has keys that torchtitan does not know: {keys}",
        "titan-tune estimate JOB names the nearest valid ones",
    ),
    failure(
        "not-under-torchrun",
        r"KeyError: '(?:LOCAL_RANK|WORLD_SIZE|RANK)'|environment variable (?:RANK|WORLD_SIZE) expected",
        "torchtitan was started without torchrun",
        "start it by torchrun --nproc_per_node N -m torchtitan.train …",
    ),
    failure(
        "unknown-flavor",
        r"KeyError: '(?P<flavor>[^']*)'",
        "model.flavor = {flavor!r} is not one of the model's",
        "titan-tune estimate JOB lists them; [titan_tune.model_args] defines a new one",
        frame="torchtitan/train.py:__init__",
    ),
    failure(
        "unknown-flavor",
        r"model\.flavor='(?P<flavor>[^']*)' is not a flavor of (?P<rest>[^\n]*)",
        "model.flavor = {flavor!r} is not a flavor of {rest}",
        "use one of them; [titan_tune.model_args] defines a new one",
    ),
    failure(
        "unknown-model",
        r"TrainSpec (?P<name>\S+) is not registered",
        "model.name = {name!r} is not a model of torchtitan",
        "use llama3, llama4, qwen3, deepseek_v3 or gpt_oss, or import yours by experimental.custom_import",
    ),
    failure(
        "tokenizer-missing",
        r"No supported tokenizer files found|Detected \S+ path which was deprecated|Tokenizer path .* does not exist|"
        r"tokenizer_path '.*' does not exist",
        "the tokenizer is missing",
        "set model.hf_assets_path to a folder with tokenizer.json (scripts/download_hf_assets.py); a titan-tune "
        "probe needs none",
    ),
    failure(
        "dataset-unknown",
        r"Dataset (?P<name>\S+) is not supported",
        "training.dataset = {name!r} is not one of torchtitan's",
        "use c4 or c4_test, or register yours",
    ),
    failure(
        "dataset-unreachable",
        r"Couldn't reach|ConnectionError: .*huggingface|LocalEntryNotFoundError|DatasetNotFoundError|"
        r"OfflineModeIsEnabled",
        "the dataset could not be loaded",
        "set training.dataset_path to a local copy; a titan-tune probe makes its own tokens",
    ),
    failure(
        "module-missing",
        r"(?:ModuleNotFoundError|ImportError): No module named '(?P<name>[^']*)'",
        "the Python package {name!r} is not installed where the ranks run",
        "install it in the environment of torchrun (titan-tune doctor checks it)",
    ),
    failure(
        "disk-full",
        r"No space left on device",
        "a disk is full",
        "free space in job.dump_folder and in the compile caches (TORCHINDUCTOR_CACHE_DIR, TRITON_CACHE_DIR)",
    ),
)

MACHINE: Final = (*SETUP, *DEVICE, *COLLECTIVES, *COMPILER)

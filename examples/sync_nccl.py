"""Full weights go to the policy engine over NCCL instead of through a file.

    python main.py --lora-rank 0 --extra examples/sync_nccl.py

Not run on a GPU yet. On a CPU the protocol is tested against vLLM's own worker code; NCCL itself
and the GPUs' streams are not.

It pays where a file does not do: the engine is on another machine (--policy-url), or /dev/shm is
too small for the weights. Elsewhere the file (sync.through_memory) is simpler and as good. Trainer
and engine need different GPUs, and the engine must reach the trainer's machine on any TCP port; an
ssh tunnel is not enough. An engine that you start yourself needs the ENGINE_FLAGS of the last line.

The steps are those of vLLM 0.32.0's weight transfer (vllm/distributed/weight_transfer,
vllm/entrypoints/rl/online/api_router.py); all else stays Sync.push_full's:
 1. Once: /init_weight_transfer_engine, while the trainer joins: one NCCL group of the trainer's
    rank 0 and all workers of the engine. Each side waits for the other.
 2. Per version, in the pause: /start_weight_update; /update_weights with names, dtypes and shapes,
    while the trainer broadcasts the bytes in packs; /finish_weight_update.
vLLM's NCCLTrainerWeightTransferEngine does the same, but goes on waiting for an engine that has
refused, so its reason never shows.
"""

import contextlib
import functools
import socket
import threading
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from urllib.parse import urlsplit

from sync import ENGINE_FLAGS, ROUTES, SyncError, free_port

# torch and vLLM are imported where they are used: main and the simulated users load this file too.

LIMIT = 300  # s for each step; vLLM's workers wait as long for the trainer to join
PACK = 256 << 20  # bytes; about 4 packs at once are on the trainer's GPU. One tensor may be larger:
# that makes a larger pack and a harmless warning of vLLM's.


@contextlib.contextmanager
def through_nccl(sync, version, tensors):
    """A row of ROUTES, as sync.through_memory -> hand_over(), called in the pause.

    tensors: name in the engine's checkpoint -> whole CPU tensor in the engine's dtype. KEEP: whole
    before the first broadcast; gathering shards between two broadcasts deadlocks the two groups.
    And of one dtype: vLLM cannot unpack float32 after an odd number of bfloat16.
    """
    refuse(sync.cfg)
    group = open_group(sync)  # at the first version, before its pause

    def hand_over():
        try:
            send(sync, group, version, tensors)
        except SyncError:
            # Aborts our half of a broadcast, so that this process can end. The engine's half cannot
            # be: its workers may stay in NCCL and answer nothing, not even /resume, until main (or
            # you, at --policy-url) ends the engine.
            group.destroy()
            raise

    yield hand_over


def refuse(cfg):
    """SyncError where this file cannot work."""
    shared = set(cfg.layout["trainer"]) & set(cfg.layout["policy"])
    for wrong, sentence in ((cfg.lora_rank, "it sends full weights: use --lora-rank 0"),
                            (cfg.device == "cpu", "NCCL needs GPUs"),
                            (shared, "NCCL refuses a GPU that trainer and policy engine share: "
                                     "give each its own, such as --gpus 1,1,0")):
        if wrong:
            raise SyncError(f"examples/sync_nccl.py: {sentence}, or leave out --extra")


@functools.cache  # once per run
def open_group(sync):
    """Rank 0 is this process, ranks 1... are the engine's workers -> vLLM's PyNcclCommunicator."""
    from vllm.distributed.weight_transfer import nccl_common

    workers = sync.call("GET", "/get_world_size")["world_size"]  # its tensor-parallel size
    info = nccl_common.NCCLWeightTransferInitInfo(
        master_address=own_address(sync.url), master_port=free_port(), rank_offset=1,
        world_size=1 + workers, packed=True, packed_buffer_size_bytes=PACK)
    return post(sync, "/init_weight_transfer_engine",
                {"init_info": nccl_common.worker_init_payload(info)},
                meanwhile=lambda: nccl_common.trainer_init(info))  # rank 0's GPU is the current one


def send(sync, group, version, tensors):
    """All tensors -> the engine's model. Every worker gets all bytes and keeps its part."""
    from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

    info = {"names": list(tensors), "shapes": [list(t.shape) for t in tensors.values()],
            "dtype_names": [str(t.dtype).removeprefix("torch.") for t in tensors.values()]}

    def broadcast():  # one tensor after the other goes to the GPU, until a pack is full
        packed_nccl_broadcast_producer(iter(tensors.items()), group, src=0, buffer_size_bytes=PACK,
                                       post_iter_func=lambda item: item[1].to(group.device))

    post(sync, "/start_weight_update")
    post(sync, "/update_weights", {"update_info": info}, meanwhile=broadcast)
    post(sync, "/finish_weight_update", {"weight_version": str(version)})


def post(sync, path, body=None, meanwhile=lambda: None):
    """POST to the engine, and at the same time what the engine waits for -> result of meanwhile().
    SyncError as soon as one of the two fails, or when they are not done after LIMIT seconds."""
    sides = {"engine": in_thread(lambda: sync.call("POST", path, body)),
             "trainer": in_thread(meanwhile)}
    done, late = wait(sides.values(), LIMIT, FIRST_EXCEPTION)
    for future in sides.values():  # the engine's first: its words say more
        if future in done and future.exception():
            error = future.exception()
            raise SyncError(f"weights over NCCL, {path}: {error}") from error
    if late:
        names = " and ".join(side for side, future in sides.items() if future in late)
        raise SyncError(f"weights over NCCL, {path}: {names} not done after {LIMIT} s")
    return sides["trainer"].result()


def in_thread(job):
    """-> a Future. KEEP: a bare daemon thread. What waits in NCCL cannot be interrupted; Python
    leaves such a thread behind when it ends, but waits for the threads of a pool."""
    future = Future()

    def work():
        try:
            future.set_result(job())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future


def own_address(url):
    """This machine's address on the way to `url`. (UDP: nothing is sent.)"""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.connect((urlsplit(url).hostname, 9))
        return s.getsockname()[0]


ROUTES["full"] = through_nccl
ENGINE_FLAGS += ["--weight-transfer-config", '{"backend": "nccl"}']

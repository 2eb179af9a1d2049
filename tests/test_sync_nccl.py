"""examples/sync_nccl.py between the real Sync and vLLM's own code for routes, workers and packing;
only NCCL, streams and devices are stand-ins."""

import contextlib
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_sync import SWAP, Engine, Service, until

import sync
from sync import SyncError

FILE = Path(sync.__file__).resolve().parent / "examples" / "sync_nccl.py"
LAYOUT = {"policy": ["0", "1"], "judge": [], "trainer": ["2"]}
UPDATE = ["/start_weight_update", "/update_weights", "/finish_weight_update"]
PAUSE = [x for call in SWAP for x in (UPDATE if call == "/collective_rpc" else [call])]
SHAPES = {"embed.weight": (10, 3), "norm.weight": (3,), "up.weight": (4, 3), "up.bias": (4,),
          "down.weight": (3, 4), "head.scale": (),  # name in the checkpoint -> shape
          "a": (5,), "b": (2,)}  # those of Service.push_full


class Wire:
    """In place of vLLM's PyNcclCommunicator. Bytes go through the group's own TCP store; a
    broadcast ends when all have joined it, as NCCL's does, so nothing works one after the other."""

    device, made, broken = torch.device("cpu"), [], None

    def __init__(self, group, device):
        self.group, self.sent, self.destroyed = group, [], False
        self.made.append(self)

    def broadcast(self, pack, src):
        assert pack.device == self.device and pack.dtype == torch.uint8 and pack.dim() == 1
        if self.broken and self.group.rank == src:
            self.broken()
        self.sent.append(pack.clone())
        pack.copy_(self.group.broadcast(pack, src))
        self.group.barrier()

    def destroy(self):
        self.destroyed = True


class Model(torch.nn.Module):
    """What vLLM's workers load into, by the names of the checkpoint."""

    def __init__(self, dtype):
        super().__init__()
        self.loaded = []
        for name, shape in SHAPES.items():
            layer, _, leaf = name.rpartition(".")
            if layer and not hasattr(self, layer):
                self.add_module(layer, torch.nn.Module())
            value = torch.nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)
            (getattr(self, layer) if layer else self).register_parameter(leaf, value)

    def load_weights(self, pairs):
        from vllm.model_executor.model_loader.weight_utils import default_weight_loader

        params = dict(self.named_parameters())
        for name, value in pairs:
            self.loaded.append(name)
            getattr(params[name], "weight_loader", default_weight_loader)(params[name], value)


def make_worker(rank, world, dtype):
    """vLLM's worker process after its start, as far as weights are concerned."""
    from vllm.config import VllmConfig
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
    from vllm.v1.worker.gpu_worker import Worker

    model, worker, config = Model(dtype), object.__new__(Worker), VllmConfig()
    record_metadata_for_reloading(model)
    config.parallel_config.rank, config.parallel_config.world_size = rank, world
    worker.vllm_config, worker.model_runner = config, SimpleNamespace(reset_lora_state=int)
    worker._weight_update_active = worker._weight_update_is_draft = False
    worker.weight_transfer_engine = WeightTransferEngineFactory.create_engine(
        WeightTransferConfig(backend="nccl"), config, torch.device("cpu"), model)
    return worker


class NcclEngine(Engine):
    """The fake engine with vLLM's own routes for weight transfer and, behind them, its workers.
    A path in `silent` is never answered."""

    def __init__(self, workers, dtype):
        super().__init__()
        from fastapi import FastAPI
        from fastapi.testclient import TestClient
        from vllm.entrypoints.rl.online.api_router import router
        from vllm.entrypoints.serve.exception_handling.register import init_exception_handler

        self.workers = [make_worker(rank, workers, dtype) for rank in range(workers)]
        self.models = [w.weight_transfer_engine.model for w in self.workers]
        self.silent, self.released, self.version = (), threading.Event(), None
        self.vllm_config = self.workers[0].vllm_config
        app = FastAPI()
        app.include_router(router)
        init_exception_handler(app)
        app.state.engine_client, app.state.args = self, SimpleNamespace(log_error_stack=False)
        self.routes = TestClient(app, raise_server_exceptions=False)

    def answer(self, path, body):
        if path in self.silent:
            self.released.wait()  # until the test is over
            return 503, {}
        if path not in (*UPDATE, "/init_weight_transfer_engine", "/get_world_size"):
            return super().answer(path, body)
        said = (self.routes.get(path) if path == "/get_world_size" else
                self.routes.post(path, json=body))
        return said.status_code, said.json()

    # what vLLM's routes call

    async def init_weight_transfer_engine(self, request):
        self.all("init_weight_transfer_engine", request.init_info)

    async def start_weight_update(self):
        self.all("start_weight_update")

    async def update_weights(self, request):
        self.all("update_weights", request.update_info)

    async def finish_weight_update(self, weight_version):
        self.all("finish_weight_update")
        self.version, self.weights = weight_version, self.weights + 1

    def all(self, method, *args):
        """vLLM's collective_rpc: on all workers at once."""
        with ThreadPoolExecutor(len(self.workers)) as pool:
            list(pool.map(lambda worker: getattr(worker, method)(*args), self.workers))


@pytest.fixture
def nccl(monkeypatch):
    """The names in examples/sync_nccl.py, loaded as --extra does it, on a machine with no GPU."""
    from vllm.distributed.device_communicators import pynccl
    from vllm.distributed.weight_transfer import packed_tensor

    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(packed_tensor, "_get_streams", lambda device, count: (stream,) * count)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    monkeypatch.setattr(pynccl, "PyNcclCommunicator", Wire)
    monkeypatch.setattr(Wire, "made", [])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sync, "ROUTES", dict(sync.ROUTES))
    monkeypatch.setattr(sync, "ENGINE_FLAGS", [])
    sync.load_extra(str(FILE))
    names = sync.ROUTES["full"].__wrapped__.__globals__
    names["PACK"] = 64
    return names


@pytest.fixture
def make(nccl, tmp_path):
    """make(workers=1, dtype=float32, **config) -> Service with a running NcclEngine"""
    with contextlib.ExitStack() as stack:

        def make(workers=1, dtype=torch.float32, **cfg):
            engine = stack.enter_context(NcclEngine(workers, dtype))
            stack.callback(engine.released.set)
            return Service(engine, tmp_path, **{"lora_rank": 0, "layout": LAYOUT} | cfg)

        yield make


def weights(seed, dtype=torch.float32):
    """name -> tensor, in the order of a checkpoint; down.weight is a view of its transpose."""
    rng = torch.Generator().manual_seed(seed)
    values = {n: torch.randn(shape, generator=rng).to(dtype) for n, shape in SHAPES.items()}
    return values | {"down.weight": values["down.weight"].t().contiguous().t()}


def hand_over(service, version, tensors):
    """through_nccl as push_full uses it."""
    with sync.ROUTES["full"](service.sync, version, tensors) as hand_over:
        hand_over()


def sender():
    """The trainer's end of the group."""
    (wire,) = [wire for wire in Wire.made if wire.group.rank == 0]
    return wire


# --------------------------------------------------------------------------------- what arrives


@pytest.mark.parametrize(("workers", "dtype"), [(1, torch.bfloat16), (2, torch.float32)])
def test_every_worker_gets_every_tensor(make, workers, dtype):
    """Two versions: the engine's models hold them bit by bit, each name was loaded once and in
    order. World size, ranks, address, names, dtypes, shapes and packs are all read by vLLM's own
    code. A view that is not contiguous would arrive scrambled if its memory were sent."""
    service = make(workers, dtype)
    for version in (1, 2):
        tensors = weights(version, dtype)
        assert not tensors["down.weight"].is_contiguous()
        hand_over(service, version, tensors)
        assert service.engine.version == str(version)
        for model in service.engine.models:
            held = dict(model.named_parameters())
            assert held.keys() == tensors.keys()
            for name, value in tensors.items():
                assert held[name].dtype == value.dtype and torch.equal(held[name], value), name
            assert model.loaded == [*SHAPES] * version
    assert sorted(wire.group.rank for wire in Wire.made) == [*range(workers + 1)], "one group"


def test_tensors_travel_in_packs(nccl, make):
    """The model is never on the trainer's GPU as a whole: a pack goes as soon as it exceeds PACK.
    Both sides cut by the same number, which the engine is told when the group is opened."""
    nccl["PACK"] = 40
    service = make()
    hand_over(service, 1, weights(1))
    # bytes: embed 120 | norm 12, up.weight 48 | up.bias 16, down 48 | scale 4, a 20, b 8
    assert [pack.numel() for pack in sender().sent] == [120, 60, 64, 32]
    assert service.engine.workers[0].weight_transfer_engine.packed_buffer_size_bytes == 40


# ------------------------------------------------------------------------------------- the order


def test_order_of_a_swap(make):
    """The group is opened once, before the first pause; in the pause start, update, finish.
    (Update and broadcast are at once: `Wire` lets neither side go on alone.)"""
    service = make()
    metrics, calls = service.push_full(), service.engine.calls
    assert calls == ["/get_world_size", "/init_weight_transfer_engine", "/weight_checker", *PAUSE,
                     "/weight_checker", "publish base"]
    assert (metrics["canary"], metrics["bytes"]) == ("ok", 28) and service.policy.version == 1
    calls.clear()
    service.push_full()
    assert calls == [*PAUSE, "/weight_checker", "publish base"] and service.policy.version == 2
    assert len(Wire.made) == 2 and not sender().destroyed


# -------------------------------------------------------------------------------------- failures


def fails(service, words):
    """A push that fails with these words, long before the usual limit of 300 s, and leaves the old
    version published."""
    start = time.monotonic()
    with pytest.raises(SyncError, match=words):
        service.push_full()
    assert time.monotonic() - start < 60
    calls = service.engine.calls
    assert "publish base" not in calls and service.policy.version == 0
    return calls


def stuck(event):
    """What a thread does that waits in NCCL for a partner that never comes."""
    event.wait()
    raise RuntimeError("aborted")


@pytest.mark.parametrize(("answer", "limit", "words"), [
    ((500, {"error": "Weight transfer not configured"}), 300, "answered 500: .*not configured"),
    (None, 0.2, "/init_weight_transfer_engine: engine and trainer not done after 0.2 s")])
def test_engine_does_not_join(nccl, make, monkeypatch, answer, limit, words):
    """The trainer waits for it in vain, in a thread that nobody waits for. With the usual limit the
    refusal is an error at once. The engine was not even paused."""
    from vllm.distributed.weight_transfer import nccl_common

    service, path = make(), "/init_weight_transfer_engine"
    monkeypatch.setattr(nccl_common, "stateless_init_process_group",
                        lambda *args: stuck(service.engine.released))
    service.engine.answers[path], service.engine.silent = answer, () if answer else (path,)
    nccl["LIMIT"] = limit
    assert "/pause?mode=keep" not in fails(service, words)


def test_trainer_cannot_join(make, monkeypatch):
    """Its own words, while the engine goes on waiting for it."""
    from vllm.distributed.weight_transfer import nccl_common

    def refused(*args):
        raise RuntimeError("NCCL error: invalid usage")

    service = make()
    monkeypatch.setattr(nccl_common, "stateless_init_process_group", refused)
    service.engine.silent = ("/init_weight_transfer_engine",)
    calls = fails(service, "/init_weight_transfer_engine: NCCL error: invalid usage")
    assert "/pause?mode=keep" not in calls


@pytest.mark.parametrize("path", UPDATE)
def test_engine_refuses(make, monkeypatch, path):
    """Its words at once, also while the trainer's thread waits in a broadcast for it. Users get the
    engine back, and our half of the broadcast is aborted."""
    service = make()
    service.engine.answers[path] = (500, {"error": "shape mismatch"})
    monkeypatch.setattr(Wire, "broken", lambda wire: stuck(service.engine.released))
    if path == "/finish_weight_update":
        monkeypatch.setattr(Wire, "broken", None)
    calls = fails(service, f"{path} answered 500: .*shape mismatch")
    assert calls[-2:] == [path, "/resume"] and sender().destroyed


def test_worker_fails_amid_the_update(make):
    """An error in vLLM's worker reaches the user through vLLM's own route."""

    def load_weights(pairs):
        raise RuntimeError("no room")

    service = make()
    service.engine.models[0].load_weights = load_weights
    calls = fails(service, "/update_weights answered 500: .*no room")
    assert calls[-2:] == ["/update_weights", "/resume"] and sender().destroyed


@pytest.mark.parametrize("path", UPDATE)
def test_engine_never_answers(nccl, make, path):
    """After LIMIT seconds the run has an error and the users have the engine."""
    service = make()
    hand_over(service, 1, weights(1))  # a group that works
    service.engine.calls.clear()
    service.engine.silent, nccl["LIMIT"] = (path,), 0.2
    assert "/resume" in fails(service, "not done after 0.2 s") and sender().destroyed


def test_trainer_fails_amid_the_update(make, monkeypatch):
    """The engine waits in its broadcast and would not answer; nobody waits for its answer."""
    service = make()

    def broken(wire):
        until(lambda: "/update_weights" in service.engine.calls)
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(Wire, "broken", broken)
    service.engine.silent = ("/update_weights",)
    assert fails(service, "/update_weights: CUDA out of memory")[-1] == "/resume"
    assert sender().destroyed


@pytest.mark.parametrize(("cfg", "words"), [
    ({"lora_rank": 16}, "use --lora-rank 0"), ({"device": "cpu"}, "needs GPUs"),
    ({"layout": LAYOUT | {"trainer": ["0"]}}, "share.*--gpus 1,1,0")])
def test_refuses_what_it_cannot_do(make, cfg, words):
    """Before anything is asked of the engine."""
    assert fails(make(**cfg), words) == []


# ------------------------------------------------------------------------------------ as --extra


def test_the_engine_takes_the_flags(nccl):
    """vLLM's own parser reads what main puts on the engine's command line."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    assert parser.parse_args(sync.ENGINE_FLAGS).weight_transfer_config.backend == "nccl"
    assert sync.ROUTES["full"] is nccl["through_nccl"]


@pytest.mark.parametrize(("module", "loader"), [
    ("main", "sync"), ("simulated_user", "simulated_user")])
def test_main_and_users_need_no_torch(module, loader):
    """Both load the file in their own process, where torch and vLLM would cost seconds."""
    code = (f"import sys; sys.path.insert(0, 'examples'); import {module}; "
            f"from {loader} import load_extra; load_extra({str(FILE)!r}); "
            "print([name for name in ('torch', 'vllm', 'trainer') if name in sys.modules])")
    done = subprocess.run([sys.executable, "-c", code], cwd=FILE.parent.parent,
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "[]"


def test_own_address(nccl):
    """The engine is told where to find the trainer: on loopback, loopback."""
    assert nccl["own_address"]("http://127.0.0.1:8000") == "127.0.0.1"

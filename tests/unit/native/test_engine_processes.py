"""The library in processes: forks train alike, and a process ends quietly whatever is alive."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.support.blocks import FunctionBlock, Stack, llama_stack, tokens
from tests.support.native_engine import needs_library, with_library
from tests.support.replay_programs import POLICIES, applied, replay

pytestmark = needs_library
ROOT = Path(__file__).parents[3]
BEGIN = """
    import os, sys, threading
    import torch
    from sac.native.load import library
    from tests.support.native_engine import recorded, with_library
    from tests.support.replay_programs import POLICIES, applied, gradients, replay
    from tests.support.blocks import llama_stack, tokens
    assert library() is not None
    torch.manual_seed(0)
    model = applied(llama_stack, replay(POLICIES["every second op"]))
    def step():
        model.zero_grad()
        loss = model(*tokens()).square().sum()
        loss.backward()
        return loss
    with recorded() as seen:
        for _ in range(3):
            step()
    assert seen.ops[-1] > 40
"""
ENDS = {
    "after steps": "",
    "with a graph alive": "loss = model(*tokens()).sum()",
    "with a graph in a cycle": "cycle = [model(*tokens()).sum()]; cycle.append(cycle)",
    "inside a region": """
        from tests.support.blocks import FunctionBlock, Stack
        def body(block, x):
            h = (x @ block.a).sin()
            if block.calls > 3:
                sys.exit(0)
            return h @ block.b
        other = applied(lambda: Stack(FunctionBlock(body)), replay(POLICIES["nothing"]))
        for _ in range(4):
            other(torch.randn(8, 8)).sum().backward()
    """,
    "with a thread inside a region": """
        from tests.support.blocks import FunctionBlock, Stack
        import time
        inside = threading.Event()
        def body(block, x):
            h = (x @ block.a).sin()
            if block.calls > 3:
                inside.set()
                time.sleep(60)
            return h @ block.b
        other = applied(lambda: Stack(FunctionBlock(body)), replay(POLICIES["nothing"]))
        def work():
            for _ in range(4):
                other(torch.randn(8, 8)).sum().backward()
        threading.Thread(target=work, daemon=True).start()
        assert inside.wait(60)
    """,
    "kept in a module that is torn down last": "sys.kept = model(*tokens()).sum()",
    "while backward runs": """
        model.blocks[0].register_full_backward_hook(lambda *args: sys.exit(0))
        model(tokens()[0].requires_grad_()).sum().backward()
    """,
}


OTHER = """
    import ctypes, pathlib, torch
    torchs = ctypes.CDLL(str(pathlib.Path(torch.__file__).parent / "lib" / "libtorch_python.so"))
    get = torchs._Z16getPyInterpreterv
    get.restype = ctypes.c_void_p
    # The first word of the interpreter is its table's address, whose first word is that of its virtual functions.
    word = ctypes.c_void_p
    place = word.from_address(get())
    functions = word.from_address(place.value).value
    size = ctypes.sizeof(word)
    copied = (word * 62)(*[word.from_address(functions + size * i).value for i in range(-2, 60)])
    table = (word * 8)(ctypes.addressof(copied) + 2 * size)
    for held in (copied, table):  # torch needs them to the very end
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))
    place.value = ctypes.addressof(table)

    from sac.native.load import library, status
    assert library() is None
    print(status())
    from tests.support.blocks import llama_stack, tokens
    from tests.support.replay_programs import POLICIES, applied, replay
    model = applied(llama_stack, replay(POLICIES["matmuls"]))
    for _ in range(3):
        model(*tokens()).square().sum().backward()
"""


def run(program: str) -> tuple[int, str, str]:
    """Run a program in a process of its own; return its exit code and what it wrote."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("end", ENDS)
def test_a_process_ends_quietly(end: str) -> None:
    assert run(textwrap.dedent(BEGIN) + textwrap.dedent(ENDS[end])) == (0, "", "")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="knows how torch's table lies in memory on Linux")
def test_another_extension_has_wrapped_the_table_first() -> None:
    """Then the library stays off, and regions train without it."""
    code, said, errors = run(OTHER)
    assert (code, errors) == (0, "")
    assert said.startswith("native: off, ")
    assert "another extension has replaced torch's interpreter table" in said


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_trains_alike() -> None:
    """The child goes on with the graph of its parent, and with steps of its own."""
    with with_library():
        model = applied(llama_stack, replay(POLICIES["every second op"]))
        for _ in range(3):
            model(*tokens()).square().sum().backward()
        model.zero_grad()
        x = tokens()[0]
        loss = model(x).square().sum()
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                loss.backward()
                model(x).square().sum().backward()
                content = torch.cat([one.grad.view(-1) for one in model.parameters()]).numpy().tobytes()
                with os.fdopen(write, "wb") as pipe:
                    pipe.write(content)
                code = 0
            finally:
                os._exit(code)
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            content = pipe.read()
        assert os.waitpid(child, 0)[1] == 0
        loss.backward()
        model(x).square().sum().backward()
    assert content == torch.cat([one.grad.view(-1) for one in model.parameters()]).numpy().tobytes()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_while_other_threads_record() -> None:
    """The child tells the library of an op whose call site no thread of the parent has met."""

    def body(block: FunctionBlock, x: Tensor) -> Tensor:
        h = block.layer(x)[0]
        return h.cos() if is_child else h

    def build() -> Stack:
        return Stack(FunctionBlock(body, layer=nn.LSTM(4, 4))).double()

    def record() -> None:
        while not is_over.is_set():
            model(x)

    is_child = False
    is_over = threading.Event()
    x = torch.randn(50, 1, 4, dtype=torch.float64)
    with with_library():
        model = applied(build, replay(POLICIES["matmuls"]))
        for _ in range(3):
            model(x).sum().backward()
        threads = [threading.Thread(target=record) for _ in range(2)]
        for thread in threads:
            thread.start()
        codes: list[int] = []
        try:
            for _ in range(10):
                child = os.fork()
                if child == 0:
                    code = 1
                    try:
                        signal.alarm(30)
                        is_child = True
                        model(x[:1]).sum().backward()
                        code = 0
                    finally:
                        os._exit(code)
                codes.append(os.waitpid(child, 0)[1])
        finally:
            is_over.set()
            for thread in threads:
                thread.join()
    assert set(codes) == {0}

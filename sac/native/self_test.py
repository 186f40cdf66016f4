"""The program that loads a library and runs its self-test, in a process of its own: a wrong library may end it.

It imports no other module of sac, so that it starts quickly. Its arguments: the file, and what the library has to give
as ``sources``. It prints ``PASSED``, or fails with an error.
"""

from __future__ import annotations

import sys
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from types import ModuleType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

PASSED = "sac: the self-test has passed"
_NAME = "_sac_native"  # the function that Python calls in a library is PyInit_ with this name


def load_file(path: str) -> ModuleType:
    """Load the library in a file, whatever the file is called; raises ``ImportError`` if it is none."""
    loader = ExtensionFileLoader(_NAME, path)
    spec = spec_from_loader(_NAME, loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


def check_built_for(module: ModuleType, digest: str) -> None:
    """Raise ``ImportError`` if a library does not say that it was compiled for this process, whatever its name says."""
    found = module.built_for()
    release = torch.__version__.partition("+")[0]
    if not release.startswith(found["torch"]):  # the headers of a nightly build have the number alone
        raise ImportError(f"it was compiled for torch {found['torch']}")
    if found["python"] >> 16 != sys.hexversion >> 16:
        raise ImportError(f"it was compiled for Python {found['python'] >> 24}.{found['python'] >> 16 & 255}")
    if found["sources"] != digest:
        raise ImportError("it was compiled from other sources")


def check_engine(module: ModuleType) -> None:
    """Let the library do a little of each kind of its work; raise ``AssertionError`` if something does not work."""
    check_tape(module)
    check_frame(module)
    check_choices(module)


def check_tape(module: ModuleType) -> None:
    """Record `sin` of a tensor under a mode and run it again; raise ``AssertionError`` if that does not work."""
    native: Any = module
    reason = native.wrap_interpreter()
    assert not reason, reason

    class Mode(native.Mode, TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError(f"{func} was not recorded")

    path: dict[int, Any] = {}
    site = object()
    sites = native.Sites()
    sites.add(path, site, "aten::sin", "", 0, 0, -1, False, False, False, 0, -1)
    tables: Any = ({}, {}, set(), {}, {}, {}, {}, {}, set(), {}, set(), [], None)
    x = torch.linspace(-1, 1, 5)
    tape, mode = native.Tape(), Mode()  # type: ignore[no-untyped-call]
    mode.sites = path
    tape.number(x, -1, x._version, 1)
    with mode:
        assert native.start(tape, mode, None, None, sites, tables), "another mode is on the stack"
        try:
            y = x.sin()
        finally:
            native.stop(tape)
    assert tape.sites([]) == [site], "the op is not on the tape"
    assert tape.reads([]) == [[0]], "the op has read something else"
    values = native.Values(2)
    values[0] = x
    filled = native.run(
        native.Program([(0, [(0, 1)], [(7, 1)], [0, 1])], [], [], [], [7]), tape, values, None, None, None
    )
    assert [handle for handle, _ in filled] == [7], "the replay filled nothing"
    assert torch.equal(filled[0][1], y), "the replay gave another value"


def check_frame(module: ModuleType) -> None:
    """Let autograd save under a handle and watch an op; raise ``AssertionError`` if that does not work."""
    native: Any = module

    class Handle(native.Handle):  # type: ignore[misc]
        __slots__ = ("__weakref__",)

    class Progress(native.Progress):  # type: ignore[misc]
        __slots__ = ("__weakref__",)

    handles = native.Handles()
    hooks = native.FrameHooks(handles, Handle, None, None)
    watch = native.Watch(native.WatchedOps(lambda name, overload: (name == "aten::topk", False, False)), handles)
    x = torch.linspace(-1, 1, 5, requires_grad=True)
    with watch:
        with torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack):
            y = x.sin()
        x.detach().topk(2)
    assert watch.found() == (0, "aten::topk"), "an op was not watched"
    assert len(handles) == 1, "autograd saved nothing"
    assert hooks[0] == (x, 0), "autograd saved something else"
    progress = Progress(None, handles, 0, stop_in_pack=False, task=-1, early_stop=True, checks=True)
    progress.pack(x)
    assert progress.done, "the recomputation is not done"
    handles.may_be_read = True
    y.sum().backward()
    assert x.grad is not None, "there is no gradient"
    assert torch.equal(x.grad, x.detach().cos()), "the gradient is another one"


def check_choices(module: ModuleType) -> None:
    """Let a watch hold what an op chooses, and serve it; raise ``AssertionError`` if that does not work."""
    native: Any = module
    assert native.intercept(("topk",)), "the dispatch key for choices is taken"
    ops = native.WatchedOps(lambda name, overload: (name == "aten::topk", name == "aten::topk", False))
    watch = native.Watch(ops, native.Handles(), None, True)
    x = torch.linspace(-1, 1, 5)
    with watch:
        chosen = x.topk(2)
    assert watch.found() is None, "a choice was not held"
    assert watch.close(0)[0].keys() == {one.untyped_storage()._cdata for one in chosen}, "something else is held"
    with native.Serving(watch):
        again = (-x).topk(2)
    assert all(map(torch.equal, chosen, again)), "a choice was not served"
    assert torch.equal((-x).topk(2)[1], torch.tensor([0, 1])), "choices are served for ever"


def main() -> None:
    """Run the self-test of the file in the arguments."""
    path, digest = sys.argv[1:]
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash is one possible result, and needs no core file
    except (ImportError, OSError, ValueError):
        pass
    module = load_file(path)
    check_built_for(module, digest)
    check_engine(module)
    print(PASSED)


if __name__ == "__main__":
    main()

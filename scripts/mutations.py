"""Slips that somebody could make in the engine, each with the promise that it breaks; `scripts/mutants` makes them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """``old`` stands exactly once in ``file`` (below sac/) and becomes ``new``; ``promise`` is a row of promises.md.

    ``earlier``: the same slip in another version of the engine, with which the suites are compared.
    """

    name: str
    promise: int
    file: str
    breaks: str
    old: str
    new: str = "pass"
    earlier: tuple[str, str] = ("", "")

    @property
    def is_cpp(self) -> bool:
        """Whether it is made in the C++ library, which has to be built anew."""
        return self.file.endswith(".h")

    def texts_in(self, source: str) -> tuple[str, str] | None:
        """Return which text of ``source`` becomes which; None if the slip cannot be made in it."""
        pairs = ((self.old, self.new), self.earlier)
        return next((pair for pair in pairs if pair[0] and source.count(pair[0]) == 1), None)


_REACHABLE, _BINDINGS, _RNG = "region/python_state.py", "region/module_state.py", "region/rng.py"
_FRAME, _KEPT_TENSOR, _HANDLES = "region/frame.py", "region/inputs.py", "region/frame.py"
_PLAN, _RUN, _TAPE = "recompute/schedule.py", "recompute/replay.py", "recompute/tape.py"
_MODES, _RECORD, _STATS = "recompute/rerun.py", "recompute/rerun.py", "recompute/op_trace.py"
_CPP_RECORD, _CPP_HANDLES = "native/csrc/record.h", "native/csrc/handles.h"
_CPP_REPLAY, _CPP_RERUN = "native/csrc/replay.h", "native/csrc/rerun.h"
_RECORDER, _KIND, _TABLE = "recompute/recorder.py", "recompute/regions.py", "recompute/table.py"

MUTATIONS = (
    # 1, exact
    Mutation(
        "rng-left",
        1,
        _RNG,
        "random states stay those of the forward",
        "            put_back(present)\n",
        "            pass\n",
    ),
    Mutation(
        "rng-no-undo-in-replay",
        1,
        _RUN,
        "a replay moves the generators for good",
        "stack.callback(generator.set_state, state_of(generator))",
    ),
    Mutation(
        "rng-served-draw",
        1,
        _MODES,
        "a draw that is served does not move its generator",
        "            generator.set_state(state)\n        outputs",
        "            pass\n        outputs",
    ),
    Mutation(
        "rng-not-drawn-before",
        1,
        "recompute/recorder.py",
        "a draw whose predecessor is not run finds another state",
        "if one in running and one in every",
        "if one in every",
    ),
    Mutation(
        "rng-tracker-live",
        1,
        "region/rng.py",
        "live states of a tracker are not copied",
        "cloned(value) if isinstance(value, torch.Tensor) else value\n        self._current",
        "value\n        self._current",
    ),
    Mutation(
        "rng-saved-module",
        1,
        "recompute/saved_results.py",
        "what a saved module drew is drawn again by what follows",
        "put_back(self._moved)",
    ),
    Mutation(
        "rng-stream-stops",
        1,
        "rng_tracker.py",
        "a named stream begins anew at each fork",
        "self._states[name] = generator.get_state()\n        generator",
        "pass\n        generator",
    ),
    Mutation(
        "autocast-of-backward",
        1,
        "region/ambient.py",
        "autocast is that of backward",
        "torch.autocast_increment_nesting()\n    _set_autocast(state)",
        "torch.autocast_increment_nesting()",
        earlier=("_set_autocast(self._settings, self._cache)", "_set_autocast(now[0], self._cache)"),
    ),
    Mutation(
        "modes-of-backward",
        1,
        "region/ambient.py",
        "torch-function modes are those of backward",
        "FUNCTION_MODES = Part(_stack_now, _exchange, _exchange, _are_same_objects)",
        "FUNCTION_MODES = Part(_stack_now, id, id, _are_same_objects)",
        earlier=("_exchange(self._stack)", "pass"),
    ),
    Mutation(
        "flags-of-backward",
        1,
        "region/ambient.py",
        "precision and determinism flags are those of backward",
        "_put(self._forward)",
    ),
    Mutation(
        "training-of-backward",
        1,
        _BINDINGS,
        "eval() between the passes changes the recomputation",
        "            _put_training(self._owners, self._training)",
        "            pass",
        earlier=("                owner.training = training", "                pass"),
    ),
    Mutation(
        "frozen-in-backward",
        1,
        _BINDINGS,
        "a parameter frozen between the passes stays frozen",
        "        _put_needs(self._held, self._need_grad)",
        "        pass",
        earlier=("parameter.requires_grad_(needs)", "pass"),
    ),
    Mutation(
        "buffer-not-put-back",
        1,
        _BINDINGS,
        "a buffer that the forward wrote unseen is read as it is now",
        "overwrite(storage, copy)",
    ),
    Mutation(
        "replay-no-writes",
        1,
        _PLAN,
        "writes to what an op reads are not replayed",
        "self._needed_roots.add(self._roots[value])",
    ),
    Mutation(
        "replay-early-free",
        1,
        _PLAN,
        "a value is let go before its last reader",
        "            self._needed.add(value)\n            frees.append(value)\n",
        "            self._needed.add(value)\n        frees.append(value)\n",
    ),
    Mutation(
        "unseen-kernel",
        1,
        _TAPE,
        "what an unseen kernel wrote is taken for the op's result",
        "return self.hold_current(tensor)  #",
        "pass  #",
    ),
    Mutation(
        "result-alias-writable",
        1,
        "region/reentrant.py",
        "one written result of a reentrant region changes another",
        "lying_in[id(root)] > 1",
        "lying_in[id(root)] > 2",
    ),
    Mutation(
        "saved-module-early",
        1,
        "recompute/whole_modules.py",
        "a saved module that backward reaches is let go",
        "call.packs_before > last_missing",
        "call.packs_before >= last_missing",
    ),
    Mutation(
        "attributes-not-put-back",
        1,
        _REACHABLE,
        "attributes that changed are not those of the forward",
        "            if holder.differs(now):",
        "            if not holder.differs(now):",
    ),
    Mutation(
        "attributes-advance-twice",
        1,
        _REACHABLE,
        "a counter advances in recomputation too",
        "found.append((holder, now))",
    ),
    Mutation(
        "python-random-left",
        1,
        "region/rng.py",
        "random.random() stays where recomputation left it",
        "            if not _equal(read(), present):",
        "            if _equal(read(), present):",
    ),
    # 2, never saves what cannot be saved
    Mutation(
        "saves-alias",
        2,
        _MODES,
        "an argument that an op gives back is held as its result",
        "_aliases(args, kwargs, out) or ",
        "",
    ),
    Mutation(
        "saves-given-back",
        2,
        "recompute/recorder.py",
        "replay holds an argument that an op gives back",
        "if not count or min(roots[first:]) < first:",
        "if not count:",
    ),
    Mutation(
        "saves-in-place-op",
        2,
        _TABLE,
        "rules bind ops whose results cannot be saved",
        "if site.savable and not site.is_bookkeeping:",
        "if not site.is_bookkeeping:",
    ),
    # 3, in-place ops
    Mutation(
        "held-not-copied",
        3,
        "recompute/recorder.py",
        "replay holds a saved value that is written to later",
        "self._copy_kept(root)",
    ),
    Mutation(
        "served-not-copied",
        3,
        _RECORD,
        "rerun holds a saved value that is written to later",
        "self._copy_saved(address)",
    ),
    Mutation(
        "views-apart",
        3,
        "region/inputs.py",
        "of two inputs in one storage only one is copied",
        "for kept in inside:",
        "for kept in inside[:1]:",
    ),
    Mutation(
        "stop-before-fill",
        3,
        _HANDLES,
        "recomputation stops before rrelu has filled its noise",
        "if self.early_stop and not any(shares_storage(tensor, written) for tensor in recent):",
        "if self.early_stop:",
    ),
    Mutation(
        "image-not-put-back",
        3,
        "recompute/forward_state.py",
        "what the region wrote outside is written twice",
        "overwrite(held, one.copy)",
        earlier=(
            "for storage, image in self._images:\n            overwrite(storage, image)",
            "for _ in self._images:\n            pass",
        ),
    ),
    # 4, tolerant and strict
    Mutation(
        "dtype-unchecked",
        4,
        _FRAME,
        "a recomputed tensor of another dtype is taken",
        "or tensor.dtype != handle.dtype or tensor.device",
        "or tensor.device",
    ),
    Mutation(
        "unmatched-silent",
        4,
        _MODES,
        "a saved value that finds no call is no error",
        "if rivals or value.must_save or value.rng_after:",
        "if value.must_save or value.rng_after:",
    ),
    Mutation(
        "served-for-another",
        4,
        _MODES,
        "a value is served for a call with other arguments",
        "if arguments_agree(value.description, seen, closely=self.state.saw_grad):",
        "if seen or not seen:",
    ),
    Mutation(
        "swapped-silent",
        4,
        _MODES,
        "another value than the forward's is filled in",
        "if value_id != seen and not tolerated:",
        "if value_id != seen and tolerated:",
    ),
    Mutation(
        "write-unnoticed",
        4,
        _HANDLES,
        "a kept value that was written to is no error",
        "version_of(watched) != self.version:",
        "version_of(watched) < self.version:",
    ),
    Mutation(
        "outside-changed",
        4,
        _RUN,
        "a tensor from outside that was written to is read as it is",
        "raise ExternalChangeError(tensor, leaf.version)",
    ),
    # 5, backward as often as autograd allows
    Mutation("dropped-though-retained", 5, _FRAME, "retain_graph is not heeded", "last=not retains)", "last=True)"),
    Mutation(
        "read-twice", 5, _FRAME, "a second read of ctx.saved_tensors finds nothing", "wanted.task = -2  #", "pass  #"
    ),
    Mutation(
        "reentrant-dropped",
        5,
        "region/reentrant.py",
        "retain_graph is not heeded by the reentrant frame",
        "last = not graph_is_retained()",
        "last = True",
    ),
    Mutation(
        "kept-written-by-replay",
        5,
        _RUN,
        "a replay writes to what the next one starts from",
        "values[value] = values[value].clone()",
    ),
    Mutation(
        "input-written-again",
        5,
        _KEPT_TENSOR,
        "a recomputation writes to the kept input",
        "data = copied(data, storages)  #",
        "pass  #",
    ),
    Mutation(
        "served-written-again",
        5,
        _RECORD,
        "a recomputation writes to the value that is served",
        "            value.written = True",
        "            pass",
    ),
    Mutation(
        "object-not-copied",
        5,
        "region/inputs.py",
        "a recomputation works on the kept object itself",
        "return _copied(self._copy, {}, {})",
        "return self._copy",
    ),
    # 6, no dead bytes
    Mutation(
        "saved-after-the-end",
        6,
        _RECORD,
        "results that recomputation never reaches are held",
        "v.packs_before <= last_missing and not self._is_dead",
        "not self._is_dead",
    ),
    Mutation(
        "view-holds-base",
        6,
        _RECORD,
        "a small view holds its large base",
        "clone_small_views([handle for handle in kept if not handle.is_external and handle.storage not in addresses])",
    ),
    Mutation("replay-holds-all", 6, _RECORDER, "values that replay does not start from are held", "tape.kept = held"),
    Mutation(
        "replay-runs-saved",
        6,
        _PLAN,
        "what the policy saves is computed again",
        "if (value in needed or value in waiting) and value not in self._kept",
        "if value in needed or value in waiting",
    ),
    Mutation(
        "no-early-stop",
        6,
        _FRAME,
        "recomputation runs to the end of the region",
        "early = self.settings.early_stop",
        "early = False",
    ),
    Mutation(
        "inputs-always-held",
        6,
        _FRAME,
        "inputs are held although nothing is recomputed",
        "if not handle.is_kept), -1)",
        "if not handle.is_kept), 0)",
    ),
    # 7, no leaks
    Mutation(
        "graph-in-handle",
        7,
        _HANDLES,
        "a recomputed node holds itself",
        "tensor = tensor.detach() if self.stop_in_pack else detached(tensor)",
    ),
    Mutation(
        "mode-holds-frame",
        7,
        _MODES,
        "after an error the frame is held in a circle",
        "self.progress = NoEarlyStop()  #",
        "pass  #",
    ),
    Mutation(
        "tape-not-dropped", 7, _RECORDER, "the tape outlives its backward", "        self.tape.drop()", "        pass"
    ),
    Mutation(
        "inputs-not-dropped",
        7,
        "region/frame.py",
        "inputs outlive their backward",
        "        self.inputs.drop()",
        "        pass",
    ),
    Mutation(
        "slot-not-given-back",
        7,
        "stores/contiguous.py",
        "a slot stays taken after backward",
        "        self._inner.drop()\n        self._slots.give_back(self._ticket)",
        "        self._inner.drop()",
    ),
    # 8, free when off
    Mutation(
        "region-without-grad",
        8,
        "checkpointing.py",
        "a region is made although grad mode is off",
        "    if not torch.is_grad_enabled():\n        return function(*args, **kwargs)\n    given = (",
        "    given = (",
    ),
    Mutation(
        "nothing-learnt",
        8,
        _KIND,
        "every call runs under a dispatch mode",
        "remember(evidence.needs_no_mode, signature)",
        "pass",
    ),
    Mutation(
        "frame-for-nothing",
        8,
        _KIND,
        "a region that saves everything makes a frame",
        "signature in self.evidence.needs_no_mode and active_hooks() is None:",
        "signature in self.evidence.needs_no_mode and active_hooks() is not None:",
        earlier=(
            "if everything and surrounding_hooks() is None:",
            "if everything and surrounding_hooks() is not None:",
        ),
    ),
    Mutation(
        "function-forgotten",
        8,
        "recompute/regions.py",
        "a function is a new one in each call",
        "_put(_regions, _key(fingerprint), region)",
    ),
    # 9, the same on every rank
    Mutation(
        "collective-skipped",
        9,
        _PLAN,
        "a collective that nobody here reads is not repeated",
        "kept\n        return not results or any(value not in self._kept for value in results)",
        "kept\n        return False",
    ),
    Mutation(
        "share-too-small",
        9,
        "stores/scatter.py",
        "the last elements are in no rank's share",
        "elements = -(-flat.numel() // self.size)",
        "elements = flat.numel() // self.size",
    ),
    Mutation(
        "ranks-not-compared",
        9,
        "stores/scatter.py",
        "a tensor that differs between ranks is scattered",
        "if position not in self.verify:",
        "if position in self.verify:",
    ),
    Mutation(
        "alone-in-python",
        9,
        "recompute/replay.py",
        "one rank runs Python again while others replay",
        "if recorder.has_collectives:",
        "if not recorder.has_collectives:",
    ),
    # 10, routing is saved, buffers advance once
    Mutation(
        "routing-not-saved",
        10,
        _TABLE,
        "topk chooses anew in recomputation",
        "if decision is Decision.RECOMPUTE and site.must_save:",
        "if decision is Decision.SAVE and site.must_save:",
    ),
    Mutation(
        "routing-anew-after-replay",
        10,
        "recompute/fallback.py",
        "topk chooses anew where replay gives way",
        "self._waiting[one.site].append(one)",
    ),
    Mutation(
        "routing-let-go",
        10,
        _RECORD,
        "a choice that only saved ops read is made anew",
        "value.written or value.must_save or value.rng_after",
        "value.written or value.rng_after",
    ),
    Mutation(
        "buffer-advances-twice",
        10,
        _BINDINGS,
        "statistics advance in recomputation too",
        "stack.callback(overwrite, storage, copy_of(storage))",
    ),
    Mutation(
        "recorded-write-stays",
        10,
        "recompute/forward_state.py",
        "what a recorded region wrote outside advances twice",
        "overwrite(held, present)",
        earlier=(
            "for storage, image in self._present:\n            overwrite(storage, image)",
            "for _ in self._present:\n            pass",
        ),
    ),
    # 11, invisible
    Mutation(
        "learnt-is-copied",
        11,
        "recompute/evidence.py",
        "a model that has run cannot be copied or pickled",
        "def __reduce__(self) -> tuple[Any, ...]:",
        "def reduce(self) -> tuple[Any, ...]:",
    ),
    Mutation(
        "hooks-turned-round",
        11,
        "outer_hooks.py",
        "the hooks around a region change their order",
        "for pair in reversed(pairs):",
        "for pair in pairs:",
    ),
    Mutation(
        "instance-forward",
        11,
        "recompute/module_tracker.py",
        "a forward that somebody put on a saved module is passed over",
        "            if self.before is not None:\n                return self.before(*args, **kwargs)\n",
        "",
    ),
    # 12, honest
    Mutation(
        "borrowed-counted",
        12,
        "recompute/rerun.py",
        "the report counts parameters as saved",
        "if not handle.is_external and isinstance(handle.value, torch.Tensor):",
        "if isinstance(handle.value, torch.Tensor):",
    ),
    Mutation(
        "inputs-not-counted",
        12,
        "region/inputs.py",
        "the report leaves the inputs out",
        "            elif isinstance(kept.data, torch.Tensor):\n"
        "                sizes.update(storage_sizes(kept.data))\n",
        "",
    ),
    Mutation(
        "dead-not-counted",
        12,
        _RECORD,
        "the report leaves out what was decided and let go",
        "self.dead_bytes += storage_bytes(part)",
    ),
    Mutation(
        "gives-way-in-silence",
        12,
        _KIND,
        "engine: replay falls back without a word",
        "            if asked:\n",
        "            if not asked:\n",
    ),
    Mutation(
        "misnamed-in-tape",
        12,
        "recompute/recorder.py",
        "replay reports dead bytes that are held",
        "if address not in sizes)",
        "if address in sizes)",
    ),
    Mutation(
        "layout-refused",
        12,
        "stores/store.py",
        "contiguous inputs are kept whole, in silence",
        "if stride[i] < extent:",
        "if stride[i] <= extent:",
    ),
    # in C++: `scripts/mutants` builds the library anew
    Mutation(
        "native-version-unseen",
        3,
        _CPP_RECORD,
        "an op that reads what was written unseen is replayed on what was there before",
        "return counter.current_version() == value.version ? found->second : -1;",
        "return found->second;",
    ),
    Mutation(
        "native-data-unseen",
        1,
        _CPP_RECORD,
        "a tensor whose data was exchanged is taken for what it was",
        " || has_moved(value, impl)) return -1;",
        ") return -1;",
    ),
    Mutation(
        "native-number-forgotten",
        1,
        _CPP_RECORD,
        "replay multiplies by another number",
        "t.pool.emplace_back(number_in(argument.toTensor()));",
        "t.pool.emplace_back(at::Scalar(1.0));",
    ),
    Mutation(
        "native-draw-forgotten",
        1,
        _CPP_RECORD,
        "replay draws other random numbers than forward",
        "entry.draws = state.defined();",
        "entry.draws = false;",
    ),
    Mutation(
        "native-turn-not-taken",
        9,
        _CPP_RECORD,
        "an alternating rule saves every call",
        "if (site.verdict == Verdict::ALTERNATE) alternations_of(t, site.rule)++;",
        "",
    ),
    Mutation(
        "native-parameters-kept",
        6,
        _CPP_RECORD,
        "what is computed from parameters alone is kept from the second call on",
        "!site.depends_on_inputs[number])",
        "false)",
    ),
    Mutation(
        "native-changed-kept",
        3,
        _CPP_HANDLES,
        "backward reads a kept tensor that was changed in place",
        "(watched.is_inference() ? 0 : watched._version()) == handle->version",
        "watched.defined()",
    ),
    Mutation(
        "native-step-not-freed",
        7,
        _CPP_REPLAY,
        "replay holds everything that it has computed until its end",
        "for (const int value : step.frees) values[value].reset();",
        "",
    ),
    Mutation(
        "native-written-parameter",
        3,
        _CPP_REPLAY,
        "replay starts from a parameter as it is after the region has written to it",
        "PyDict_Contains(args[3], address) == 0 && PyDict_Contains(args[4], root) == 0",
        "true",
    ),
    Mutation(
        "native-other-program",
        1,
        "native/csrc/tape.h",
        "a program whose ops read other values is given the schedule of an earlier one",
        "a.values.size() == b.values.size() && a.reads == b.reads &&",
        "a.values.size() == b.values.size() &&",
    ),
    Mutation(
        "native-verify-blind",
        12,
        "native/csrc/checksum.h",
        "`verify` finds no difference",
        "PyLong_AsLongLong(PyTuple_GET_ITEM(sums, 0)) != now",
        "now < -1",
    ),
    Mutation(
        "native-views-alike",
        4,
        _CPP_RERUN,
        "rerun takes calls on two parts of a tensor for one",
        "  signature.add(static_cast<uint64_t>(offset));\n",
        "",
    ),
    Mutation(
        "native-reader-unseen",
        1,
        _CPP_RERUN,
        "rerun lets go of a saved result that an op reads",
        "is_pythons = reads_saved(ids, *known, *stack, base);",
        "is_pythons = false;",
    ),
    Mutation(
        "native-no-early-stop",
        9,
        _CPP_RERUN,
        "recomputation runs on after it has filled everything",
        "is_pythons = is_set(progress.get(), names().done);",
        "is_pythons = false;",
    ),
    Mutation(
        "native-external-unnamed",
        4,
        _CPP_RERUN,
        "a value computed from an external tensor has to be the same in both passes",
        "  if (signature.is_external && PySet_Add(ids.external, id) < 0) throw python_error();\n",
        "",
    ),
    Mutation(
        "native-attribute-unseen",
        1,
        "native/csrc/walk.h",
        "an attribute that was set to another object is not put back",
        " || PyList_GET_ITEM(args[4], index) != value) Py_RETURN_FALSE;",
        ") Py_RETURN_FALSE;",
    ),
)

// The optional part of sac in C++: records and replays ordinary ops, and packs what autograd saves of them.
//
// It also walks over the modules of a region. It changes time only: sac/recompute and sac/region do the same in Python,
// and do everything that is not ordinary.
#include "at_start.h"
#include "checksum.h"
#include "choices.h"
#include "fill.h"
#include "forwards.h"
#include "late.h"
#include "handles.h"
#include "interpreter.h"
#include "marks.h"
#include "places.h"
#include "record.h"
#include "replay.h"
#include "rerun.h"
#include "state.h"
#include "surroundings.h"
#include "survey.h"
#include "tape.h"
#include "walk.h"
#include "watch.h"

#include <torch/version.h>

#ifndef SAC_SOURCES
#error "compile this with `sac build`, which passes -DSAC_SOURCES"
#endif

namespace sac {
namespace {

template <typename Function>
PyCFunction as_method(Function function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function));
}

PyMethodDef tape_methods[] = {
    {"known", as_method(tape_known), METH_O, nullptr},
    {"has_moved", as_method(tape_has_moved), METH_FASTCALL, nullptr},
    {"number", as_method(tape_number), METH_FASTCALL, nullptr},
    {"arguments", as_method(tape_arguments), METH_FASTCALL, nullptr},
    {"watch", as_method(tape_watch), METH_O, nullptr},
    {"entry_count", as_method(tape_entry_count), METH_NOARGS, nullptr},
    {"value_count", as_method(tape_value_count), METH_NOARGS, nullptr},
    {"append", as_method(tape_append), METH_FASTCALL, nullptr},
    {"add_input", as_method(tape_add_input), METH_O, nullptr},
    {"root_of", as_method(tape_root_of), METH_O, nullptr},
    {"version", as_method(tape_version), METH_O, nullptr},
    {"set_version", as_method(tape_set_version), METH_FASTCALL, nullptr},
    {"root_at", as_method(tape_root_at), METH_O, nullptr},
    {"record_storage", as_method(tape_record_storage), METH_FASTCALL, nullptr},
    {"sync", as_method(tape_sync), METH_NOARGS, nullptr},
    {"tensor_of", as_method(tape_tensor_of), METH_O, nullptr},
    {"alive", as_method(tape_alive), METH_NOARGS, nullptr},
    {"roots", as_method(tape_roots), METH_O, nullptr},
    {"sites", as_method(tape_sites), METH_O, nullptr},
    {"templates", as_method(tape_templates), METH_O, nullptr},
    {"first_outputs", as_method(tape_first_outputs), METH_O, nullptr},
    {"reads", as_method(tape_reads), METH_O, nullptr},
    {"layout", as_method(tape_layout), METH_NOARGS, nullptr},
    {"has_layout", as_method(tape_has_layout), METH_O, nullptr},
    {"hits", as_method(tape_hits), METH_NOARGS, nullptr},
    {"calls", as_method(tape_calls), METH_O, nullptr},
    {"set_calls", as_method(tape_set_calls), METH_FASTCALL, nullptr},
    {"alternations", as_method(tape_alternations), METH_O, nullptr},
    {"set_alternations", as_method(tape_set_alternations), METH_FASTCALL, nullptr},
    {"note_left", as_method(tape_note_left), METH_O, nullptr},
    {"take_draws", as_method(tape_take_draws), METH_NOARGS, nullptr},
    {"tell_parameters", as_method(tape_tell_parameters), METH_NOARGS, nullptr},
    {"leaves_to_check", as_method(tape_leaves_to_check), METH_O, nullptr},
    {"parameter_ids", as_method(tape_parameter_ids), METH_O, nullptr},
    {"add_factory", as_method(tape_add_factory), METH_FASTCALL, nullptr},
    {"factory", as_method(tape_factory), METH_O, nullptr},
    {"factory_count", as_method(tape_factory_count), METH_NOARGS, nullptr},
    {"remove_factory", as_method(tape_remove_factory), METH_O, nullptr},
    {"recent", as_method(tape_recent), METH_NOARGS, nullptr},
    {"clear_recent", as_method(tape_clear_recent), METH_NOARGS, nullptr},
    {"note_recent", as_method(tape_note_recent), METH_FASTCALL, nullptr},
    {"forget_tensors", as_method(tape_forget_tensors), METH_NOARGS, nullptr},
    {"drop", as_method(tape_drop), METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot tape_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(tape_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(tape_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(tape_traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(tape_clear)},
    {Py_tp_members, tape_members},
    {Py_tp_getset, tape_getset},
    {Py_tp_methods, tape_methods},
    {0, nullptr},
};
PyType_Spec tape_spec = {"_sac_native.Tape", sizeof(Tape), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, tape_slots};

PyMethodDef handles_methods[] = {
    {"get", as_method(handles_get), METH_O, nullptr},
    {"alive", as_method(handles_alive), METH_NOARGS, nullptr},
    {"split", as_method(handles_split), METH_NOARGS, nullptr},
    {"waiting", as_method(handles_waiting), METH_O, nullptr},
    {"last_waiting", as_method(handles_last_waiting), METH_O, nullptr},
    {"fill", as_method(handles_fill), METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyType_Slot handles_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(handles_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(handles_dealloc)},
    {Py_sq_length, reinterpret_cast<void*>(handles_length)},
    {Py_tp_members, handles_members},
    {Py_tp_methods, handles_methods},
    {0, nullptr},
};
PyType_Spec handles_spec = {"_sac_native.Handles", sizeof(Handles), 0, Py_TPFLAGS_DEFAULT, handles_slots};

PyType_Slot handle_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(handle_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(handle_traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(handle_clear)},
    {Py_tp_members, handle_members},
    {0, nullptr},
};
PyType_Spec handle_spec = {"_sac_native.Handle", sizeof(Handle), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE, handle_slots};

PyMethodDef places_methods[] = {
    {"get", as_method(places_get), METH_O, nullptr},
    {"keys", as_method(places_keys), METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyType_Slot places_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(places_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(places_dealloc)},
    {Py_tp_iter, reinterpret_cast<void*>(places_iter)},
    {Py_tp_richcompare, reinterpret_cast<void*>(places_compare)},
    {Py_tp_hash, reinterpret_cast<void*>(PyObject_HashNotImplemented)},
    {Py_mp_subscript, reinterpret_cast<void*>(places_item)},
    {Py_mp_ass_subscript, reinterpret_cast<void*>(places_put)},
    {Py_sq_contains, reinterpret_cast<void*>(places_contains)},
    {Py_tp_methods, places_methods},
    {0, nullptr},
};
PyType_Spec places_spec = {"_sac_native.Places", sizeof(Places), 0, Py_TPFLAGS_DEFAULT, places_slots};

PyMethodDef checksums_methods[] = {
    {"keys", as_method(checksums_keys), METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyType_Slot checksums_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(checksums_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(checksums_dealloc)},
    {Py_tp_iter, reinterpret_cast<void*>(checksums_iter)},
    {Py_mp_length, reinterpret_cast<void*>(checksums_length)},
    {Py_mp_subscript, reinterpret_cast<void*>(checksums_item)},
    {Py_mp_ass_subscript, reinterpret_cast<void*>(checksums_put)},
    {Py_sq_contains, reinterpret_cast<void*>(checksums_contains)},
    {Py_tp_methods, checksums_methods},
    {0, nullptr},
};
PyType_Spec checksums_spec = {"_sac_native.Checksums", sizeof(Checksums), 0, Py_TPFLAGS_DEFAULT, checksums_slots};

PyMethodDef hooks_methods[] = {
    {"pack", as_method(hooks_pack), METH_O, nullptr},
    {"unpack", as_method(hooks_unpack), METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyType_Slot hooks_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(hooks_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(hooks_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(hooks_traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(hooks_clear)},
    {Py_tp_methods, hooks_methods},
    {0, nullptr},
};
PyType_Spec hooks_spec = {"_sac_native.Hooks", sizeof(Hooks), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, hooks_slots};

PyMethodDef frame_hooks_methods[] = {
    {"pack", as_method(frame_hooks_pack), METH_O, nullptr},
    {"unpack", as_method(frame_hooks_unpack), METH_O, nullptr},
    {"forget", as_method(frame_hooks_forget), METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyType_Slot frame_hooks_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(frame_hooks_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(frame_hooks_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(frame_hooks_traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(frame_hooks_clear)},
    {Py_sq_item, reinterpret_cast<void*>(frame_hooks_packed)},
    {Py_tp_methods, frame_hooks_methods},
    {0, nullptr},
};
PyType_Spec frame_hooks_spec = {"_sac_native.FrameHooks", sizeof(FrameHooks), 0,
                                Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, frame_hooks_slots};

PyMethodDef progress_methods[] = {
    {"pack", as_method(progress_pack), METH_O, nullptr},
    {"after_op", as_method(progress_after_op), METH_NOARGS, nullptr},
    {"take_recent", as_method(progress_take_recent), METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyType_Slot progress_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(progress_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(progress_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(progress_traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(progress_clear)},
    {Py_tp_members, progress_members},
    {Py_tp_methods, progress_methods},
    {0, nullptr},
};
PyType_Spec progress_spec = {"_sac_native.Progress", sizeof(Progress), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE, progress_slots};

PyMethodDef late_methods[] = {
    {"pack", as_method(late_pack), METH_O, nullptr},
    {"flush", as_method(late_flush), METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyType_Slot late_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(late_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(late_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(late_traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(late_clear)},
    {Py_tp_members, late_members},
    {Py_tp_getset, late_getset},
    {Py_tp_methods, late_methods},
    {0, nullptr},
};
PyType_Spec late_spec = {"_sac_native.LatePacking", sizeof(LatePacking), 0,
                         Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE, late_slots};

PyMemberDef mode_members[] = {
    {"sites", T_OBJECT_EX, offsetof(Mode, sites), 0, nullptr},
    {"path", T_OBJECT_EX, offsetof(Mode, path), 0, nullptr},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(Mode, weakrefs), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

int mode_traverse(Mode* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(self->sites);
  Py_VISIT(self->path);
  Py_VISIT(self->sites_at);
  return 0;
}

int mode_clear(Mode* self) {
  Py_CLEAR(self->sites);
  Py_CLEAR(self->path);
  Py_CLEAR(self->sites_at);
  return 0;
}

void mode_dealloc(Mode* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  if (self->weakrefs != nullptr) PyObject_ClearWeakRefs(reinterpret_cast<PyObject*>(self));
  mode_clear(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyType_Slot mode_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(mode_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(mode_traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(mode_clear)},
    {Py_tp_members, mode_members},
    {0, nullptr},
};
PyType_Spec mode_spec = {"_sac_native.Mode", sizeof(Mode), 0,
                         Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE, mode_slots};

PyMethodDef ids_methods[] = {
    {"enter", as_method(ids_enter), METH_FASTCALL, nullptr},
    {"leave", as_method(ids_leave), METH_NOARGS, nullptr},
    {"take", as_method(ids_take), METH_NOARGS, nullptr},
    {"forget", as_method(ids_forget), METH_NOARGS, nullptr},
    {"views", as_method(ids_views), METH_NOARGS, nullptr},
    {"packs", as_method(ids_packs), METH_NOARGS, nullptr},
    {"producers", as_method(ids_producers), METH_NOARGS, nullptr},
    {"note_saved", as_method(ids_note_saved), METH_O, nullptr},
    {"name_input", as_method(ids_name_input), METH_FASTCALL, nullptr},
    {"name_input_again", as_method(ids_name_input_again), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyType_Slot ids_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(ids_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(ids_dealloc)},
    {Py_tp_members, ids_members},
    {Py_tp_getset, ids_getset},
    {Py_tp_methods, ids_methods},
    {0, nullptr},
};
PyType_Spec ids_spec = {"_sac_native.Ids", sizeof(Ids), 0, Py_TPFLAGS_DEFAULT, ids_slots};

PyMethodDef id_view_methods[] = {
    {"get", as_method(id_view_get), METH_FASTCALL, nullptr},
    {"setdefault", as_method(id_view_setdefault), METH_FASTCALL, nullptr},
    {"pop", as_method(id_view_pop), METH_O, nullptr},
    {"clear", as_method(id_view_clear), METH_NOARGS, nullptr},
    {"add", as_method(id_view_add), METH_O, nullptr},
    {"watch", as_method(id_view_watch), METH_O, nullptr},
    {"isdisjoint", as_method(id_view_isdisjoint), METH_O, nullptr},
    {"keys", as_method(id_view_keys), METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyType_Slot id_view_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(id_view_dealloc)},
    {Py_tp_iter, reinterpret_cast<void*>(id_view_iter)},
    {Py_mp_length, reinterpret_cast<void*>(id_view_length)},
    {Py_mp_subscript, reinterpret_cast<void*>(id_view_item)},
    {Py_mp_ass_subscript, reinterpret_cast<void*>(id_view_put)},
    {Py_sq_contains, reinterpret_cast<void*>(id_view_contains)},
    {Py_tp_methods, id_view_methods},
    {0, nullptr},
};
PyType_Spec id_view_spec = {"_sac_native.IdView", sizeof(IdView), 0,
                            Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, id_view_slots};

PyMethodDef packs_methods[] = {{"append", as_method(packs_append), METH_O, nullptr}, {nullptr, nullptr, 0, nullptr}};
PyType_Slot packs_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(packs_dealloc)},
    {Py_sq_length, reinterpret_cast<void*>(packs_length)},
    {Py_sq_item, reinterpret_cast<void*>(packs_item)},
    {Py_tp_methods, packs_methods},
    {0, nullptr},
};
PyType_Spec packs_spec = {"_sac_native.Packs", sizeof(Packs), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, packs_slots};

PyMethodDef watch_methods[] = {
    {"__enter__", as_method(watch_enter), METH_NOARGS, nullptr},
    {"__exit__", as_method(watch_exit), METH_FASTCALL, nullptr},
    {"found", as_method(watch_found), METH_NOARGS, nullptr},
    {"written", as_method(watch_written), METH_NOARGS, nullptr},
    {"keep", as_method(watch_keep), METH_O, nullptr},
    {"close", as_method(watch_close), METH_O, nullptr},
    {"forget", as_method(watch_forget), METH_NOARGS, nullptr},
    {"holds_choices", as_method(watch_holds_choices), METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyType_Slot watch_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(watch_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(watch_dealloc)},
    {Py_tp_methods, watch_methods},
    {0, nullptr},
};
PyType_Spec watch_spec = {"_sac_native.Watch", sizeof(Watch), 0, Py_TPFLAGS_DEFAULT, watch_slots};

PyMethodDef serving_methods[] = {
    {"__enter__", as_method(serving_enter), METH_NOARGS, nullptr},
    {"__exit__", as_method(serving_exit), METH_FASTCALL, nullptr},
    {"left", as_method(serving_left), METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyType_Slot serving_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(serving_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(serving_dealloc)},
    {Py_tp_methods, serving_methods},
    {0, nullptr},
};
PyType_Spec serving_spec = {"_sac_native.Serving", sizeof(Serving), 0, Py_TPFLAGS_DEFAULT, serving_slots};

PyType_Slot watched_ops_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(watched_ops_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(watched_ops_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(watched_ops_traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(watched_ops_clear)},
    {0, nullptr},
};
PyType_Spec watched_ops_spec = {"_sac_native.WatchedOps", sizeof(WatchedOps), 0,
                                Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, watched_ops_slots};

PyMethodDef survey_methods[] = {{"take", as_method(survey_take), METH_O, nullptr}, {nullptr, nullptr, 0, nullptr}};
PyType_Slot survey_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(survey_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(survey_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(survey_traverse)},
    {Py_tp_methods, survey_methods},
    {0, nullptr},
};
PyType_Spec survey_spec = {"_sac_native.Survey", sizeof(Survey), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
                           survey_slots};

PyMethodDef reached_methods[] = {
    {"holds", as_method(reached_holds), METH_NOARGS, nullptr},
    {"table", as_method(reached_table), METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyType_Slot reached_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(reached_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(reached_traverse)},
    {Py_tp_methods, reached_methods},
    {0, nullptr},
};
PyType_Spec reached_spec = {"_sac_native.Reached", sizeof(Reached), 0,
                            Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                            reached_slots};

PyMethodDef at_start_methods[] = {
    {"close", as_method(at_start_close), METH_O, nullptr},
    {"has_same_tensors", as_method(at_start_has_same_tensors), METH_NOARGS, nullptr},
    {"lacks_copy", as_method(at_start_lacks_copy), METH_O, nullptr},
    {"has_same_versions", as_method(at_start_has_same_versions), METH_NOARGS, nullptr},
    {"note", as_method(at_start_note), METH_NOARGS, nullptr},
    {"contents", as_method(at_start_contents), METH_NOARGS, nullptr},
    {"spares", as_method(at_start_spares), METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyType_Slot at_start_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(at_start_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(at_start_traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(at_start_clear)},
    {Py_tp_members, at_start_members},
    {Py_tp_getset, at_start_getset},
    {Py_tp_methods, at_start_methods},
    {0, nullptr},
};
PyType_Spec at_start_spec = {"_sac_native.AtStart", sizeof(AtStart), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                             at_start_slots};

PyMethodDef surroundings_methods[] = {
    {"differences", as_method(surroundings_differences), METH_O, nullptr},
    {"forget", as_method(surroundings_forget), METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyType_Slot surroundings_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(surroundings_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(surroundings_dealloc)},
    {Py_tp_methods, surroundings_methods},
    {0, nullptr},
};
PyType_Spec surroundings_spec = {"_sac_native.Surroundings", sizeof(Surroundings), 0, Py_TPFLAGS_DEFAULT,
                                 surroundings_slots};

// -- Call sites

PyObject* sites_new(PyTypeObject* type, PyObject*, PyObject*) {
  auto* self = reinterpret_cast<Sites*>(type->tp_alloc(type, 0));
  if (self == nullptr) return nullptr;
  static uint64_t tables = 0;  // with the GIL
  self->number = ++tables;
  self->paths = new std::unordered_map<PyObject*, std::unique_ptr<PathSites>>();
  return reinterpret_cast<PyObject*>(self);
}

void sites_dealloc(Sites* self) {
  PyTypeObject* type = Py_TYPE(self);
  for (const auto& [path, sites] : *self->paths)
    for (const auto& [schema, site] : *sites) Py_DECREF(site->object);
  delete self->paths;
  type->tp_free(self);
  Py_DECREF(type);
}

// The path's dictionary of call sites, the site, the op's name and overload, `Memory`, `Verdict`, the rule or -1,
// whether the op may draw, whether each call of it is another draw, whether its results must be saved, `OnTape`, the
// argument that it writes to or -1. The table that owns the dictionary owns this too. Of two threads that add a site,
// the first decides which object stands for it.
PyObject* sites_add(Sites* self, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *path = nullptr, *object = nullptr;
  const char *name = nullptr, *overload = nullptr;
  int memory = 0, verdict = 0, rule = -1, draws = 0, is_random = 0, must_save = 0, on_tape = 0, written = -1;
  if (!PyArg_ParseTuple(args, "OOssiiipppii", &path, &object, &name, &overload, &memory, &verdict, &rule, &draws,
                        &is_random, &must_save, &on_tape, &written))
    return nullptr;
  const auto handle = c10::Dispatcher::singleton().findSchema({name, overload});
  if (!handle) Py_RETURN_NONE;
  auto site = std::make_unique<Site>(Site{object, std::make_unique<Op>(*handle), static_cast<Memory>(memory),
                                          static_cast<Verdict>(verdict), rule, draws != 0, is_random != 0,
                                          must_save != 0, on_tape, written, {}});
  std::unique_lock<std::shared_mutex> writing(sites_lock);
  auto& sites = (*self->paths)[path];
  if (!sites) sites = std::make_unique<PathSites>();
  if (sites->emplace(&handle->schema(), std::move(site)).second) Py_INCREF(object);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyMethodDef sites_methods[] = {{"add", as_method(sites_add), METH_VARARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};
PyType_Slot sites_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(sites_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(sites_dealloc)},
    {Py_tp_methods, sites_methods},
    {0, nullptr},
};
PyType_Spec sites_spec = {"_sac_native.Sites", sizeof(Sites), 0, Py_TPFLAGS_DEFAULT, sites_slots};

// -- Replay

PyType_Slot values_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(values_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(values_dealloc)},
    {Py_sq_length, reinterpret_cast<void*>(values_length)},
    {Py_sq_item, reinterpret_cast<void*>(values_get)},
    {Py_sq_ass_item, reinterpret_cast<void*>(values_set)},
    {0, nullptr},
};
PyType_Spec values_spec = {"_sac_native.Values", sizeof(Values), 0, Py_TPFLAGS_DEFAULT, values_slots};

PyMethodDef below_methods[] = {
    {"__enter__", as_method(below_enter), METH_NOARGS, nullptr},
    {"__exit__", as_method(below_exit), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyType_Slot below_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(below_dealloc)},
    {Py_tp_methods, below_methods},
    {0, nullptr},
};
PyType_Spec below_spec = {"_sac_native.Below", sizeof(Below), 0, Py_TPFLAGS_DEFAULT, below_slots};

PyMethodDef program_methods[] = {
    {"replay", as_method(program_replay), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyType_Slot program_slots[] = {
    {Py_tp_methods, program_methods},
    {Py_tp_new, reinterpret_cast<void*>(program_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(program_dealloc)},
    {0, nullptr},
};
PyType_Spec program_spec = {"_sac_native.Program", sizeof(Program), 0, Py_TPFLAGS_DEFAULT, program_slots};

// What the library was compiled for. sac/native/self_test.py compares it with the process that loads the library.
PyObject* built_for(PyObject*, PyObject*) {
  return Py_BuildValue("{s:s,s:k,s:s}", "torch", TORCH_VERSION, "python", (unsigned long)PY_VERSION_HEX, "sources",
                       SAC_SOURCES);
}

PyMethodDef methods[] = {
    {"built_for", as_method(built_for), METH_NOARGS, nullptr},
    {"listen", as_method(listen), METH_FASTCALL, nullptr},
    {"start", as_method(start), METH_FASTCALL, nullptr},
    {"stop", as_method(stop), METH_O, nullptr},
    {"load_parameters", as_method(load_parameters), METH_FASTCALL, nullptr},
    {"look_at_kept", as_method(look_at_kept), METH_FASTCALL, nullptr},
    {"leaves_to_look_at", as_method(leaves_to_look_at), METH_FASTCALL, nullptr},
    {"written_after_save", as_method(written_after_save), METH_FASTCALL, nullptr},
    {"find_different", as_method(find_different), METH_FASTCALL, nullptr},
    {"crc32", as_method(crc32), METH_O, nullptr},
    {"intercept", as_method(intercept), METH_O, nullptr},
    {"sums_of", as_method(sums_of), METH_O, nullptr},
    {"not_as_saved", as_method(not_as_saved), METH_O, nullptr},
    {"run", as_method(run_program), METH_FASTCALL, nullptr},
    {"wrap_interpreter", as_method(wrap_interpreter), METH_NOARGS, nullptr},
    {"flat_entries", as_method(flat_entries), METH_FASTCALL, nullptr},
    {"holds_entries", as_method(holds_entries), METH_FASTCALL, nullptr},
    {"all_begin_with", as_method(all_begin_with), METH_FASTCALL, nullptr},
    {"any_entry", as_method(any_entry), METH_FASTCALL, nullptr},
    {"modules_below", as_method(modules_below), METH_FASTCALL, nullptr},
    {"at_start", as_method(at_start), METH_FASTCALL, nullptr},
    {"leaf_marks", as_method(leaf_marks), METH_O, nullptr},
    {"leaf_contents", as_method(leaf_contents), METH_O, nullptr},
    {"contents_at", as_method(contents_at), METH_FASTCALL, nullptr},
    {"entries_of_classes", as_method(entries_of_classes), METH_FASTCALL, nullptr},
    {"tensor_states", as_method(tensor_states), METH_O, nullptr},
    {"storages_of", as_method(storages_of), METH_O, nullptr},
    {"copy_of_storage", as_method(copy_of_storage), METH_O, nullptr},
    {"other_bytes", as_method(other_bytes), METH_FASTCALL, nullptr},
    {"survey_versions", as_method(survey_versions), METH_O, nullptr},
    {"is_as_copied", as_method(is_as_copied), METH_FASTCALL, nullptr},
    {"modules_are_as", as_method(modules_are_as), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "_sac_native", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace sac

PyMODINIT_FUNC PyInit__sac_native() {
  PyObject* made = PyModule_Create(&sac::module);
  if (made == nullptr) return nullptr;
  sac::survive_forks();
  const std::pair<const char*, PyType_Spec*> types[] = {
      {"Tape", &sac::tape_spec},   {"Handle", &sac::handle_spec}, {"Hooks", &sac::hooks_spec},
      {"Mode", &sac::mode_spec},   {"Sites", &sac::sites_spec},   {"Values", &sac::values_spec},
      {"Program", &sac::program_spec}, {"Ids", &sac::ids_spec}, {"Handles", &sac::handles_spec},
      {"FrameHooks", &sac::frame_hooks_spec}, {"Progress", &sac::progress_spec}, {"Watch", &sac::watch_spec},
      {"WatchedOps", &sac::watched_ops_spec}, {"Serving", &sac::serving_spec}, {"LatePacking", &sac::late_spec}, {"IdView", &sac::id_view_spec},
      {"Packs", &sac::packs_spec}, {"Survey", &sac::survey_spec}, {"Reached", &sac::reached_spec},
      {"Below", &sac::below_spec}, {"Places", &sac::places_spec}, {"Checksums", &sac::checksums_spec}, {"AtStart", &sac::at_start_spec},
      {"Surroundings", &sac::surroundings_spec},
  };
  for (const auto& [name, spec] : types) {
    PyObject* type = PyType_FromSpec(spec);
    if (type == nullptr || PyModule_AddObject(made, name, type) < 0) return nullptr;
    if (spec == &sac::places_spec) sac::PlacesType = reinterpret_cast<PyTypeObject*>(type);
    if (spec == &sac::checksums_spec) sac::ChecksumsType = reinterpret_cast<PyTypeObject*>(type);
    if (spec == &sac::mode_spec) sac::ModeType = reinterpret_cast<PyTypeObject*>(type);
    if (spec == &sac::handle_spec) sac::HandleType = reinterpret_cast<PyTypeObject*>(type);
    if (spec == &sac::progress_spec) sac::ProgressType = reinterpret_cast<PyTypeObject*>(type);
    if (spec == &sac::late_spec) sac::LatePackingType = reinterpret_cast<PyTypeObject*>(type);
    if (spec == &sac::id_view_spec) sac::IdViewType = reinterpret_cast<PyTypeObject*>(type);
    if (spec == &sac::packs_spec) sac::PacksType = reinterpret_cast<PyTypeObject*>(type);
    if (spec == &sac::surroundings_spec) sac::SurroundingsType = reinterpret_cast<PyTypeObject*>(type);
    if (spec == &sac::at_start_spec) sac::AtStartType = reinterpret_cast<PyTypeObject*>(type);
    if (spec == &sac::reached_spec) sac::ReachedType = reinterpret_cast<PyTypeObject*>(type);
  }
  return made;
}

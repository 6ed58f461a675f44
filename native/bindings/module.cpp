// unisono._engine. Only this folder uses Python. Pointers arrive as integers, because Python finds
// the address of an array faster than the binding would parse the array.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.hpp"
#include "bindings/owned_program.hpp"
#include "bindings/waits.hpp"
#include "core/cores.hpp"
#include "kernels/codes.hpp"
#include "kernels/kernels.hpp"
#include "shared/group.hpp"
#include "shared/segment.hpp"
#include "steps/steps.hpp"

namespace nb = nanobind;

namespace {

void reduce(std::uintptr_t into, std::uintptr_t other, std::size_t count, int dtype, int op) {
  unisono::ReduceFn fn =
    unisono::reduce_fn(static_cast<unisono::DType>(dtype), static_cast<unisono::RedOp>(op));
  if (fn == nullptr) {
    throw nb::value_error(
      ("reduce op " + std::to_string(op) + " is not defined on dtype " + std::to_string(dtype))
        .c_str());
  }
  unisono::InterpreterUnlock unlocked;
  auto* result = reinterpret_cast<void*>(into);
  fn(result, result, reinterpret_cast<const void*>(other), count);
}

unisono::CodecFns codec_fns(int codec) {
  const unisono::CodecFns found = unisono::codec_fns(static_cast<unisono::Codec>(codec));
  if (found.encode == nullptr) {
    throw nb::value_error(("no codec " + std::to_string(codec)).c_str());
  }
  return found;
}

void encode(int codec, std::uintptr_t values, std::uintptr_t scales, std::uintptr_t codes,
            std::size_t count) {
  const unisono::EncodeFn fn = codec_fns(codec).encode;
  nb::gil_scoped_release unlocked;
  fn(reinterpret_cast<const void*>(values), reinterpret_cast<void*>(scales),
     reinterpret_cast<void*>(codes), count);
}

void decode(int codec, std::uintptr_t scales, std::uintptr_t codes, std::uintptr_t values,
            std::size_t count, bool adds) {
  const unisono::CodecFns fns = codec_fns(codec);
  nb::gil_scoped_release unlocked;
  (adds ? fns.add : fns.decode)(reinterpret_cast<const void*>(scales),
                                reinterpret_cast<const void*>(codes),
                                reinterpret_cast<void*>(values), count);
}

void set_isa(const char* name) {
  if (!unisono::set_isa(name)) {
    throw nb::value_error((std::string("no instruction set '") + name + "' here").c_str());
  }
}

std::vector<std::string> isas() {
  std::vector<std::string> names;
  for (int i = 0; unisono::available_isa(i) != nullptr; i++) {
    names.emplace_back(unisono::available_isa(i));
  }
  return names;
}

// Return the code of each element type by Python's name of the type.
nb::typed<nb::dict, nb::str, nb::int_> dtype_codes() {
  using unisono::DType;
  const struct {
    const char* name;
    DType code;
  } table[] = {
    {"bool", DType::bool8},  {"int8", DType::i8},       {"int16", DType::i16},
    {"int32", DType::i32},   {"int64", DType::i64},     {"uint8", DType::u8},
    {"uint16", DType::u16},  {"uint32", DType::u32},    {"uint64", DType::u64},
    {"float16", DType::f16}, {"bfloat16", DType::bf16}, {"float32", DType::f32},
    {"float64", DType::f64}, {"complex64", DType::c64}, {"complex128", DType::c128},
  };
  static_assert(sizeof(table) / sizeof(table[0]) == unisono::kDTypes, "one row per DType");
  nb::typed<nb::dict, nb::str, nb::int_> codes;
  for (const auto& row : table) codes[row.name] = static_cast<int>(row.code);
  return codes;
}

#if defined(__clang__)
constexpr const char* kBuild = "clang " __clang_version__;
#else
constexpr const char* kBuild = "gcc " __VERSION__;
#endif

// Processes with different layouts of shared memory must not meet. Increase this with each change
// of a layout in shared/layout.hpp or messages/ring.hpp.
constexpr int kAbi = 9;

const unsigned char* nonce_of(const nb::bytes& nonce) {
  if (nonce.size() != sizeof(unisono::Header::nonce)) throw nb::value_error("nonce: 16 bytes");
  return static_cast<const unsigned char*>(nonce.data());
}

std::pair<int, std::shared_ptr<unisono::Segment>> create(int ranks, std::size_t slot_bytes,
                                                         const nb::bytes& nonce) {
  auto segment = std::make_shared<unisono::Segment>();
  int error = segment->create(ranks, slot_bytes, nonce_of(nonce));
  return {error, segment};
}

std::pair<int, std::shared_ptr<unisono::Segment>> attach(int pid, int fd, const nb::bytes& nonce) {
  auto segment = std::make_shared<unisono::Segment>();
  int error = segment->attach(pid, fd, nonce_of(nonce));
  return {error, segment};
}

std::unique_ptr<unisono::Group> make_group(std::shared_ptr<unisono::Segment> segment, int rank,
                                           const std::vector<int>& pids, bool crowded) {
  auto group = std::make_unique<unisono::Group>(std::move(segment), rank, pids, crowded);
  group->set_poll(&unisono::signal_raised);
  return group;
}

// The callback must not keep an object alive that keeps the runner alive.
void set_late(unisono::Runner& runner, const nb::typed<nb::callable, void()>& late,
              int64_t before_ns) {
  auto call = [late] {
    unisono::InterpreterLock locked;
    try {
      late();
    } catch (nb::python_error& error) {
      unisono::callback_raised(error, "unisono: asking the other ranks");
    } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch)
      // No rank is asked: an exception would end the call on this rank alone.
    }
  };
  runner.set_late(std::move(call), before_ns);
}

}  // namespace

NB_MODULE(_engine, m) {
  m.doc() = "The native engine.";
  m.def("dtype_codes", &dtype_codes, "Return every element type's code, by Python's name of it.");
  m.def("reduce", &reduce, nb::arg("into"), nb::arg("other"), nb::arg("count"), nb::arg("dtype"),
        nb::arg("op"), "Set into = into (op) other, element by element; pointers and codes.");
  m.def("encode", &encode, nb::arg("codec"), nb::arg("values"), nb::arg("scales"), nb::arg("codes"),
        nb::arg("count"), "Set scales and codes of float32; pointers.");
  m.def("decode", &decode, nb::arg("codec"), nb::arg("scales"), nb::arg("codes"), nb::arg("values"),
        nb::arg("count"), nb::arg("adds"),
        "Set float32 values to those of codes, or add those to them; pointers.");
  m.def("isa", &unisono::isa, "Return the name of the chosen instruction set.");
  m.def("isas", &isas, "Return the instruction sets that this machine has, from slowest.");
  m.def("set_isa", &set_isa, nb::arg("name"), "Choose an instruction set.");

  m.def("let_threads_move", &unisono::let_threads_move, nb::arg("is_allowed"),
        "Choose whether a waiting thread may leave its core to a rank.");

  using unisono::Code;
  m.attr("ABI") = kAbi;
  m.attr("BUILD") = kBuild;
  m.attr("OK") = static_cast<int>(Code::ok);
  m.attr("MISMATCH") = static_cast<int>(Code::mismatch);
  m.attr("TIMEOUT") = static_cast<int>(Code::timeout);
  m.attr("LOST") = static_cast<int>(Code::lost);
  m.attr("LEFT") = static_cast<int>(Code::left);
  m.attr("ABORTED") = static_cast<int>(Code::aborted);
  m.attr("NO_MEMORY") = static_cast<int>(Code::no_memory);
  m.attr("UNEVEN") = static_cast<int>(Code::uneven);
  m.attr("WAITING") = static_cast<int>(Code::waiting);
  m.attr("LIBRARY") = static_cast<int>(Code::library);

  nb::class_<unisono::Segment>(m, "Segment")
    .def_static("create", &create, nb::arg("ranks"), nb::arg("slot_bytes"), nb::arg("nonce"),
                "Make shared memory; return (errno or 0, segment).")
    .def_static("attach", &attach, nb::arg("pid"), nb::arg("fd"), nb::arg("nonce"),
                "Map what another process made; return (errno or 0, segment).")
    .def("place_slots", &unisono::Segment::place_slots, nb::arg("rank"), nb::arg("node"),
         "Ask for the pages of a rank's slots from a NUMA node; -1: leave them.")
    .def("fd", &unisono::Segment::fd)
    .def("close_fd", &unisono::Segment::close_fd);

  nb::class_<unisono::OwnedProgram>(m, "Program")
    .def(nb::init<std::uintptr_t, std::size_t, std::uintptr_t, std::size_t, int64_t>(),
         nb::arg("steps"), nb::arg("step_count"), nb::arg("loops"), nb::arg("loop_count"),
         nb::arg("scratch_count"));

  nb::class_<unisono::ThreadTeam>(m, "ThreadTeam")
    .def(nb::init<int>(), nb::arg("threads"), "Threads, with the caller's, that share loops.")
    .def("close", &unisono::ThreadTeam::close, nb::call_guard<nb::gil_scoped_release>(),
         "End the threads.");

  nb::class_<unisono::Runner>(m, "Runner")
    .def("set_late", &set_late, nb::arg("late"), nb::arg("before_ns"),
         "Call `late` once when a call nears its deadline.")
    .def(
      "set_recorder",
      [](unisono::Runner& runner, unisono::Recorder& recorder) { runner.set_recorder(&recorder); },
      nb::arg("recorder"), nb::keep_alive<1, 2>(), "Record for which ranks its calls wait.")
    .def("set_team", &unisono::Runner::set_team, nb::arg("team"),
         "Share the loops of large calls among threads.")
    .def("abort", &unisono::Runner::abort, "End every wait.");

  nb::class_<unisono::Group, unisono::Runner>(m, "Group")
    .def(nb::new_(&make_group), nb::arg("segment"), nb::arg("rank"), nb::arg("pids"),
         nb::arg("crowded"))
    .def("fail", &unisono::Group::fail, nb::arg("by"),
         "End every wait for what that rank of the group has not finished.")
    .def("leave", &unisono::Group::leave, "Mark this rank as gone, for the other ranks.");

  bind_interface(m);
  bind_tls(m);
  bind_store(m);
  bind_store_link(m);
  bind_recorder(m);
  bind_queue(m);
  bind_calls(m);
  bind_p2p(m);
  bind_mpi(m);
  bind_windows(m);

  nb::class_<unisono::Steps, unisono::Runner>(m, "Steps")
    .def(nb::init<std::shared_ptr<unisono::Messages>, uint64_t, std::vector<int>,
                  const std::vector<int>&, unisono::Group*>(),
         nb::arg("messages"), nb::arg("context"), nb::arg("ranks"), nb::arg("hosts"),
         nb::arg("agreement").none(), nb::keep_alive<1, 6>())
    .def("finished", &unisono::Steps::finished, "Return the number of the last finished run.");
}

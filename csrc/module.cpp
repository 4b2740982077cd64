// The Python module `_C`: facts about the build and the instruction level. Importing it also runs the
// registrations of binding.cpp. Tensors never pass through here; they go through registered ops.
#include <pybind11/pybind11.h>

#include "cpu/core.h"
#include "current_stream.h"

#if defined(__clang__)
#define FASTACCUM_COMPILER "clang " __clang_version__
#elif defined(__GNUC__)
#define FASTACCUM_COMPILER "gcc " __VERSION__
#endif

PYBIND11_MODULE(_C, module) {
  module.doc() = "Native code of fastaccum";
  module.def(
      "build_info",
      [] {
        pybind11::dict info;
        info["torch"] = FASTACCUM_TORCH_VERSION;        // whose headers were compiled against
        info["torch_target"] = FASTACCUM_TORCH_TARGET;  // the oldest torch that can load this
        info["compiler"] = FASTACCUM_COMPILER;
        info["flags"] = FASTACCUM_FLAGS;
        info["levels"] = FASTACCUM_LEVELS;  // instruction levels, comma separated
        info["cuda"] = FASTACCUM_CUDA;      // the toolkit's version; empty: no GPU kernels
        info["cuda_archs"] = FASTACCUM_CUDA_ARCHS;
        info["cuda_note"] = FASTACCUM_CUDA_NOTE;  // why there are no GPU kernels
        return info;
      },
      "Returns how this library was built, as a dict of strings.");
  module.def(
      "knows_stream", [] { return fastaccum::current_stream_of_torch() != nullptr; },
      "Whether torch's current CUDA stream can be asked for: torch is a CUDA build and was imported.");
  module.def("isa", &fastaccum::cpu::isa_name, "The instruction level in use.");
  module.def("isa_available", &fastaccum::cpu::isa_available,
             "The levels that this CPU can run, best first, separated by spaces.");
  module.def("set_isa", &fastaccum::cpu::set_isa, pybind11::arg("name"),
             "Switches the level for this process; False if it is not available.");
}

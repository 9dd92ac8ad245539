// What the binding files share: argument checks with sentences, and the Python faces of the core's objects.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "adam.hpp"
#include "engine.hpp"
#include "file.hpp"
#include "state_format.hpp"
#include "ticket.hpp"

namespace nb = nanobind;

namespace tz {

enum class Kind { u8, f32, bf16, f16 };
const char* kind_name(Kind kind);
std::size_t kind_size(Kind kind);

// A contiguous CPU array of a caller, borrowed: `hold` keeps it alive.
struct Array {
    nb::object hold;
    nb::ndarray<nb::ro> ndarray;
    char* data = nullptr;
    std::size_t count = 0;  // elements
    Kind kind = Kind::u8;
    std::size_t nbytes() const { return count * kind_size(kind); }
};

// Takes a NumPy array or torch tensor without converting or copying. TypeError names `name` and what was
// wrong.
Array take_array(nb::handle object, const char* name, std::initializer_list<Kind> kinds, bool writable,
                 int ndim = -1);

Dtype dtype_of(Kind kind);  // of a float kind

// (decay, w1, b2, w2, eps, step, bc2s, coef) and perhaps l2, each rounded to float once.
AdamScalars take_scalars(nb::handle object);

// (master, exp_avg, exp_avg_sq, amsgrad), or None for ("f32", "f32", "f32", False).
StateFormat take_format(nb::handle object);

unsigned take_threads(nb::handle object);

// A Python int as a size; TypeError or ValueError (negative, too large) names `name`.
std::uint64_t take_size(nb::handle object, const char* name);

struct PyTicket {
    std::shared_ptr<Ticket> core;
    std::vector<Array> keep;  // buffers, until the kernel is seen to be through with them
    void let_go() {
        if (core->released()) keep.clear();
    }
};

// The engine and every ticket not yet reaped: native code writes into their buffers.
struct PyEngine {
    explicit PyEngine(std::shared_ptr<Engine> engine);
    ~PyEngine();
    nb::object track(std::shared_ptr<Ticket> ticket, std::vector<Array> keep);
    void close();

    std::shared_ptr<Engine> core;
    std::unordered_map<const Ticket*, nb::object> pending;
    std::vector<nb::object> overdue;                    // reaped, but their buffers are still the kernel's
    std::unordered_map<const char*, Array> registered;  // the kernel knows their pages by address
};

// Close functions of live engines and steppers, run when the interpreter exits.
void at_exit(void* owner, void (*close)(void*));
void forget_at_exit(void* owner);

void bind_errors(nb::module_& m);
void bind_format(nb::module_& m);
void bind_io(nb::module_& m);
void bind_math(nb::module_& m);
void bind_stepper(nb::module_& m);

}  // namespace tz

// checksum, norms, adamw and what was chosen for this processor.
#include <unistd.h>

#include <algorithm>
#include <chrono>

#include "adam.hpp"
#include "align.hpp"
#include "bind.hpp"
#include "checksum.hpp"
#include "cpu.hpp"
#include "norm.hpp"
#include "parallel.hpp"
#include "slice.hpp"

namespace tz {

namespace {

constexpr std::initializer_list<Kind> kFloats = {Kind::f32, Kind::bf16, Kind::f16};

nb::tuple py_checksum(nb::handle data, nb::handle word_offset) {
    const Array array = take_array(data, "data", {Kind::u8}, false, 1);
    const std::uint64_t offset = take_size(word_offset, "word_offset");
    Checksum sum;
    {
        nb::gil_scoped_release release;
        sum = checksum(array.data, array.count, offset);
    }
    return nb::make_tuple(sum.s1, sum.s2);
}

std::vector<Norm> norms_of(nb::handle arrays, nb::handle threads, const char* what) {
    const unsigned n = take_threads(threads);
    std::vector<Array> taken;
    for (nb::handle item : nb::iter(arrays)) taken.push_back(take_array(item, what, kFloats, false));
    std::vector<Norm> norms(taken.size());
    nb::gil_scoped_release release;
    parallel(n, taken.size(), [&](std::size_t i) {
        norms[i] = l2_norm(taken[i].data, dtype_of(taken[i].kind), taken[i].count);
    });
    return norms;
}

nb::list py_l2_norms(nb::handle arrays, nb::handle threads) {
    nb::list out;
    for (const Norm& norm : norms_of(arrays, threads, "an array of l2_norms"))
        out.append(static_cast<double>(norm.value));
    return out;
}

nb::list py_finite_norms(nb::handle arrays, nb::handle threads) {
    nb::list out;
    for (const Norm& norm : norms_of(arrays, threads, "an array of finite_norms"))
        out.append(nb::make_tuple(static_cast<double>(norm.value), norm.finite));
    return out;
}

nb::tuple py_accumulate(nb::handle into, nb::handle grad) {
    const Array sum = take_array(into, "into", kFloats, true);
    const Array more = take_array(grad, "grad", kFloats, false);
    if (sum.count != more.count)
        throw nb::value_error(
            ("grad has " + std::to_string(more.count) + " elements, into has " + std::to_string(sum.count))
                .c_str());
    if (sum.kind != Kind::f32 && sum.kind != more.kind)
        throw nb::type_error("into must be float32 or have the dtype of grad");
    if (overlap(sum.data, sum.nbytes(), more.data, more.nbytes()))
        throw nb::value_error("into and grad share memory");
    Norm norm;
    {
        nb::gil_scoped_release release;
        norm = accumulate(sum.data, dtype_of(sum.kind), more.data, dtype_of(more.kind), sum.count);
    }
    return nb::make_tuple(static_cast<double>(norm.value), norm.finite);
}

void py_adamw(nb::handle p, nb::handle exp_avg, nb::handle exp_avg_sq, nb::handle grad, nb::handle out,
              nb::handle scalars, nb::handle threads, nb::handle max_exp_avg_sq) {
    const Array values = take_array(p, "p", {Kind::f32}, true);
    const Array moments = take_array(exp_avg, "exp_avg", {Kind::f32}, true);
    const Array squares = take_array(exp_avg_sq, "exp_avg_sq", {Kind::f32}, true);
    const Array grads = take_array(grad, "grad", kFloats, false);
    const bool has_out = !out.is_none();
    const Array copy = has_out ? take_array(out, "out", kFloats, true) : Array{};
    const bool amsgrad = !max_exp_avg_sq.is_none();
    const Array largest = amsgrad ? take_array(max_exp_avg_sq, "max_exp_avg_sq", {Kind::f32}, true) : Array{};
    const AdamScalars s = take_scalars(scalars);
    const unsigned n = take_threads(threads);

    std::vector<std::pair<const char*, const Array*>> named = {
        {"p", &values}, {"exp_avg", &moments}, {"exp_avg_sq", &squares}, {"grad", &grads}};
    if (has_out) named.emplace_back("out", &copy);
    if (amsgrad) named.emplace_back("max_exp_avg_sq", &largest);
    for (std::size_t i = 0; i < named.size(); ++i) {
        const auto& [name, array] = named[i];
        if (array->count != values.count)
            throw nb::value_error((std::string(name) + " has " + std::to_string(array->count) +
                                   " elements, p has " + std::to_string(values.count))
                                      .c_str());
        for (std::size_t j = 0; j < i; ++j)
            if (overlap(array->data, array->nbytes(), named[j].second->data, named[j].second->nbytes()))
                throw nb::value_error(
                    (std::string(named[j].first) + " and " + name + " share memory").c_str());
    }
    const AdamTypes types{dtype_of(grads.kind), has_out, has_out ? dtype_of(copy.kind) : Dtype::f32,
                          s.l2 != 0.0f, amsgrad};
    const auto floats = [](const Array& array) { return reinterpret_cast<float*>(array.data); };
    nb::gil_scoped_release release;
    adamw({floats(values), floats(moments), floats(squares), floats(largest), grads.data, copy.data},
          values.count, types, s, n);
}

void py_stream_ceiling(nb::handle a, nb::handle b, nb::handle c, nb::handle grad, nb::handle threads) {
    Array arrays[4] = {take_array(a, "a", {Kind::f32}, true), take_array(b, "b", {Kind::f32}, true),
                       take_array(c, "c", {Kind::f32}, true), take_array(grad, "grad", {Kind::f32}, false)};
    for (const Array& array : arrays)
        if (array.count != arrays[0].count) throw nb::value_error("the arrays differ in size");
    const unsigned n = take_threads(threads);
    const auto floats = [&](int i) { return reinterpret_cast<float*>(arrays[i].data); };
    nb::gil_scoped_release release;
    stream_ceiling(floats(0), floats(1), floats(2), floats(3), arrays[0].count, n);
}

}  // namespace

Dtype dtype_of(Kind kind) {
    return kind == Kind::bf16 ? Dtype::bf16 : kind == Kind::f16 ? Dtype::f16 : Dtype::f32;
}

AdamScalars take_scalars(nb::handle object) {
    float raw[9] = {};
    nb::object fast = nb::steal(PySequence_Fast(object.ptr(), "scalars must be a tuple of 8 or 9 floats"));
    if (!fast.is_valid()) throw nb::python_error();
    const Py_ssize_t given = PySequence_Fast_GET_SIZE(fast.ptr());
    if (given != 8 && given != 9)
        throw nb::value_error("scalars must be (decay, w1, b2, w2, eps, step, bc2s, coef) and perhaps l2");
    for (Py_ssize_t i = 0; i < given; ++i) {
        const double value = PyFloat_AsDouble(PySequence_Fast_GET_ITEM(fast.ptr(), i));
        if (value == -1.0 && PyErr_Occurred()) throw nb::python_error();
        raw[i] = static_cast<float>(value);
    }
    return {raw[0], raw[1], raw[2], raw[3], raw[4], raw[5], raw[6], raw[7], raw[8]};
}

void bind_math(nb::module_& m) {
    m.def("checksum", &py_checksum, nb::arg("data"), nb::arg("word_offset") = 0);
    m.def("l2_norms", &py_l2_norms, nb::arg("arrays"), nb::arg("threads") = 1);
    m.def("finite_norms", &py_finite_norms, nb::arg("arrays"), nb::arg("threads") = 1);
    m.def("adamw", &py_adamw, nb::arg("p"), nb::arg("exp_avg"), nb::arg("exp_avg_sq"), nb::arg("grad"),
          nb::arg("out").none(), nb::arg("scalars"), nb::arg("threads") = 1, nb::kw_only(),
          nb::arg("max_exp_avg_sq").none() = nb::none());
    m.def("accumulate", &py_accumulate, nb::arg("into"), nb::arg("grad"));
    m.def("stream_ceiling", &py_stream_ceiling, nb::arg("a"), nb::arg("b"), nb::arg("c"), nb::arg("grad"),
          nb::arg("threads") = 1);
    m.def("cpu_features", [] {
        nb::dict out;
        for (const auto& [name, has] : cpu_features()) out[name.c_str()] = has;
        return out;
    });
    m.def(
        "set_slice",
        [](double seconds) {
            if (!(seconds >= 1e-4 && seconds <= 0.1))
                throw nb::value_error("a slice is 0.0001 to 0.1 seconds");
            return set_slice(
                std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::duration<double>(seconds)));
        },
        nb::arg("seconds"));
    // Keeps the interpreter's lock, where os.eventfd_write lets go of it.
    m.def(
        "ring",
        [](int eventfd) {
            const std::uint64_t one = 1;
            if (::write(eventfd, &one, sizeof one) != sizeof one) {
                PyErr_SetFromErrno(PyExc_OSError);
                throw nb::python_error();
            }
        },
        nb::arg("eventfd"));
    m.def("adam_isa", [] { return isa_name(isa()); });
    if (!isa_warning().empty() && PyErr_WarnEx(PyExc_RuntimeWarning, isa_warning().c_str(), 1) < 0)
        throw nb::python_error();
}

}  // namespace tz

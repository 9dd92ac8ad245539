// checksum, l2_norms, adamw and what was chosen for this processor.
#include <algorithm>

#include "adam.hpp"
#include "align.hpp"
#include "bind.hpp"
#include "checksum.hpp"
#include "cpu.hpp"
#include "norm.hpp"
#include "parallel.hpp"

namespace tz {

namespace {

constexpr std::initializer_list<Kind> kFloats = {Kind::f32, Kind::bf16, Kind::f16};

unsigned take_threads(nb::handle object) {
    const std::uint64_t n = take_size(object, "threads");
    if (n < 1 || n > 1024) throw nb::value_error("threads must be between 1 and 1024");
    return static_cast<unsigned>(n);
}

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

nb::list py_l2_norms(nb::handle arrays, nb::handle threads) {
    const unsigned n = take_threads(threads);
    std::vector<Array> taken;
    for (nb::handle item : nb::iter(arrays))
        taken.push_back(take_array(item, "an array of l2_norms", kFloats, false));
    std::vector<float> norms(taken.size());
    {
        nb::gil_scoped_release release;
        parallel(n, taken.size(), [&](std::size_t i) {
            norms[i] = l2_norm(taken[i].data, dtype_of(taken[i].kind), taken[i].count);
        });
    }
    nb::list out;
    for (const float norm : norms) out.append(static_cast<double>(norm));
    return out;
}

void py_adamw(nb::handle p, nb::handle exp_avg, nb::handle exp_avg_sq, nb::handle grad, nb::handle out,
              nb::handle scalars, nb::handle threads) {
    const Array values = take_array(p, "p", {Kind::f32}, true);
    const Array moments = take_array(exp_avg, "exp_avg", {Kind::f32}, true);
    const Array squares = take_array(exp_avg_sq, "exp_avg_sq", {Kind::f32}, true);
    const Array grads = take_array(grad, "grad", kFloats, false);
    const bool has_out = !out.is_none();
    const Array copy = has_out ? take_array(out, "out", kFloats, true) : Array{};
    const AdamScalars s = take_scalars(scalars);
    const unsigned n = take_threads(threads);

    const std::pair<const char*, const Array*> named[] = {
        {"p", &values}, {"exp_avg", &moments}, {"exp_avg_sq", &squares}, {"grad", &grads}, {"out", &copy}};
    for (int i = 1; i < 4 + has_out; ++i)
        if (named[i].second->count != values.count)
            throw nb::value_error((std::string(named[i].first) + " has " +
                                   std::to_string(named[i].second->count) + " elements, p has " +
                                   std::to_string(values.count))
                                      .c_str());
    for (int i = 0; i < 4 + has_out; ++i)
        for (int j = 0; j < i; ++j)
            if (overlap(named[i].second->data, named[i].second->nbytes(), named[j].second->data,
                        named[j].second->nbytes()))
                throw nb::value_error(
                    (std::string(named[j].first) + " and " + named[i].first + " share memory").c_str());

    const AdamTypes types{dtype_of(grads.kind), has_out, has_out ? dtype_of(copy.kind) : Dtype::f32};
    nb::gil_scoped_release release;
    adamw(reinterpret_cast<float*>(values.data), reinterpret_cast<float*>(moments.data),
          reinterpret_cast<float*>(squares.data), grads.data, copy.data, values.count, types, s, n);
}

}  // namespace

Dtype dtype_of(Kind kind) {
    return kind == Kind::bf16 ? Dtype::bf16 : kind == Kind::f16 ? Dtype::f16 : Dtype::f32;
}

AdamScalars take_scalars(nb::handle object) {
    float raw[8];
    std::size_t n = 0;
    nb::object fast = nb::steal(PySequence_Fast(object.ptr(), "scalars must be a tuple of 8 floats"));
    if (!fast.is_valid()) throw nb::python_error();
    if (PySequence_Fast_GET_SIZE(fast.ptr()) != 8)
        throw nb::value_error("scalars must be (decay, w1, b2, w2, eps, step, bc2s, coef)");
    for (; n < 8; ++n) {
        const double value =
            PyFloat_AsDouble(PySequence_Fast_GET_ITEM(fast.ptr(), static_cast<Py_ssize_t>(n)));
        if (value == -1.0 && PyErr_Occurred()) throw nb::python_error();
        raw[n] = static_cast<float>(value);
    }
    return {raw[0], raw[1], raw[2], raw[3], raw[4], raw[5], raw[6], raw[7]};
}

void bind_math(nb::module_& m) {
    m.def("checksum", &py_checksum, nb::arg("data"), nb::arg("word_offset") = 0);
    m.def("l2_norms", &py_l2_norms, nb::arg("arrays"), nb::arg("threads") = 1);
    m.def("adamw", &py_adamw, nb::arg("p"), nb::arg("exp_avg"), nb::arg("exp_avg_sq"), nb::arg("grad"),
          nb::arg("out").none(), nb::arg("scalars"), nb::arg("threads") = 1);
    m.def("cpu_features", [] {
        nb::dict out;
        for (const auto& [name, has] : cpu_features()) out[name.c_str()] = has;
        return out;
    });
    m.def("adam_isa", [] { return adam_isa(); });
}

}  // namespace tz

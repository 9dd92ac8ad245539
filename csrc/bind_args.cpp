#include "bind.hpp"

namespace tz {

namespace {

std::optional<Kind> kind_of(const nb::dlpack::dtype& t) {
    if (t.lanes != 1) return std::nullopt;
    const auto code = static_cast<nb::dlpack::dtype_code>(t.code);
    if (code == nb::dlpack::dtype_code::UInt && t.bits == 8) return Kind::u8;
    if (code == nb::dlpack::dtype_code::Float && t.bits == 32) return Kind::f32;
    if (code == nb::dlpack::dtype_code::Float && t.bits == 16) return Kind::f16;
    if (code == nb::dlpack::dtype_code::Bfloat && t.bits == 16) return Kind::bf16;
    return std::nullopt;
}

[[noreturn]] void refuse(const char* name, const std::string& why) {
    throw nb::type_error((std::string(name) + " " + why).c_str());
}

bool contiguous(const nb::ndarray<nb::ro>& a) {
    std::int64_t expect = 1;
    for (std::size_t i = a.ndim(); i-- > 0;) {
        if (a.shape(i) != 1 && a.stride(i) != expect) return false;
        expect *= static_cast<std::int64_t>(a.shape(i));
    }
    return true;
}

}  // namespace

const char* kind_name(Kind kind) {
    switch (kind) {
        case Kind::u8:
            return "uint8";
        case Kind::f32:
            return "float32";
        case Kind::bf16:
            return "bfloat16";
        case Kind::f16:
            return "float16";
    }
    return "?";
}

std::size_t kind_size(Kind kind) {
    return kind == Kind::u8 ? 1 : kind == Kind::f32 ? 4 : 2;
}

Array take_array(nb::handle object, const char* name, std::initializer_list<Kind> kinds, bool writable,
                 int ndim) {
    Array out;
    if (!nb::try_cast(object, out.ndarray, false)) {
        PyErr_Clear();
        const std::string type = nb::cast<std::string>(nb::str(object.type().attr("__name__")));
        refuse(name, "must be a NumPy array or a torch tensor in host memory, not " + type);
    }
    if (writable) {
        nb::ndarray<> probe;
        if (!nb::try_cast(object, probe, false)) {
            PyErr_Clear();
            refuse(name, "is read-only, but would be written");
        }
    }
    const auto& a = out.ndarray;
    if (a.device_type() != nb::device::cpu::value && a.device_type() != nb::device::cuda_host::value)
        refuse(name, "must be in host memory");
    const auto kind = kind_of(a.dtype());
    bool accepted = false;
    std::string wanted;
    for (const Kind k : kinds) {
        accepted |= kind == k;
        wanted += (wanted.empty() ? "" : ", ") + std::string(kind_name(k));
    }
    if (!accepted)
        refuse(name, "must have dtype " + wanted +
                         (kind ? std::string(", not ") + kind_name(*kind) : std::string()));
    if (ndim >= 0 && a.ndim() != static_cast<std::size_t>(ndim))
        refuse(name, "must have " + std::to_string(ndim) + " dimension(s), not " + std::to_string(a.ndim()));
    out.count = a.size();
    if (out.count != 0 && !contiguous(a)) refuse(name, "must be contiguous");
    if (out.count != 0 && a.data() == nullptr)
        throw nb::value_error((std::string(name) + " has " + std::to_string(out.count) +
                               " elements but no memory: its storage was resized, or it is a fake tensor")
                                  .c_str());
    if (out.count != 0 && reinterpret_cast<std::uintptr_t>(a.data()) % kind_size(*kind) != 0)
        refuse(name, "must be aligned to its element size");
    out.hold = nb::borrow(object);
    out.kind = *kind;
    // constness was checked above: only arrays asked for as writable are ever written
    out.data = const_cast<char*>(static_cast<const char*>(static_cast<const void*>(a.data())));
    return out;
}

std::uint64_t take_size(nb::handle object, const char* name) {
    nb::object index = nb::steal(PyNumber_Index(object.ptr()));
    if (!index.is_valid()) {
        PyErr_Clear();
        refuse(name, "must be an integer");
    }
    const long long value = PyLong_AsLongLong(index.ptr());
    if (value == -1 && PyErr_Occurred()) {
        PyErr_Clear();
        throw nb::value_error((std::string(name) + " is out of range").c_str());
    }
    if (value < 0) throw nb::value_error((std::string(name) + " must not be negative").c_str());
    return static_cast<std::uint64_t>(value);
}

unsigned take_threads(nb::handle object) {
    const std::uint64_t n = take_size(object, "threads");
    if (n < 1 || n > 1024) throw nb::value_error("threads must be between 1 and 1024");
    return static_cast<unsigned>(n);
}

}  // namespace tz

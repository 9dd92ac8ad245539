// Stepper: Python's description of a record, checked and turned into the core's.
#include <limits>

#include "bind.hpp"
#include "forever.hpp"
#include "stepper.hpp"

namespace tz {

namespace {

struct PyStepper {
    PyStepper(nb::object engine, Array buffers_, std::unique_ptr<Stepper> core_)
        : engine_object(std::move(engine)), buffers(std::move(buffers_)), core(std::move(core_)) {
        at_exit(this, [](void* self) { static_cast<PyStepper*>(self)->close(); });
    }
    ~PyStepper() {
        forget_at_exit(this);
        if (core->foreign()) {
            (void)core.release();  // after fork its thread does not exist: leave it all alone
        } else if (!close()) {
            keep_for_ever(std::shared_ptr<Stepper>(std::move(core)));
            keep_for_ever(std::make_shared<Array>(buffers));
        }
    }
    bool close() {
        if (core->foreign()) return true;
        nb::gil_scoped_release release;
        return core->close();
    }

    nb::object engine_object;
    Array buffers;
    std::unique_ptr<Stepper> core;
};

// The items of a tuple or list of exactly n; `what` names it in the TypeError.
std::vector<nb::object> take_items(nb::handle object, std::size_t n, const std::string& what) {
    if (!nb::isinstance<nb::tuple>(object) && !nb::isinstance<nb::list>(object))
        throw nb::type_error((what + " must be a tuple").c_str());
    std::vector<nb::object> items;
    for (nb::handle item : nb::iter(object)) items.push_back(nb::borrow(item));
    if (items.size() != n)
        throw nb::value_error(
            (what + " must have " + std::to_string(n) + " items, not " + std::to_string(items.size()))
                .c_str());
    return items;
}

Place take_place(nb::handle file, nb::handle offset, const char* name) {
    File* found = nullptr;
    if (!nb::try_cast(file, found) || found == nullptr)
        throw nb::type_error((std::string(name) + " must start with a File").c_str());
    return {found->open(), take_size(offset, name)};
}

Dtype take_dtype(nb::handle object, const std::string& what) {
    if (nb::isinstance<nb::str>(object)) {
        const auto name = nb::cast<std::string>(object);
        if (name == "f32") return Dtype::f32;
        if (name == "bf16") return Dtype::bf16;
        if (name == "f16") return Dtype::f16;
    }
    throw nb::value_error((what + ": a dtype is \"f32\", \"bf16\" or \"f16\"").c_str());
}

std::int64_t take_offset(nb::handle object, const std::string& what) {
    const long long value = PyLong_AsLongLong(object.ptr());
    if (value == -1 && PyErr_Occurred()) {
        PyErr_Clear();
        throw nb::type_error((what + ": an offset must be an integer number of bytes, or -1").c_str());
    }
    return value;
}

// Any 64 bits.
std::uint64_t take_key(nb::handle object, const std::string& what) {
    const unsigned long long value =
        PyLong_Check(object.ptr()) ? PyLong_AsUnsignedLongLong(object.ptr()) : ~0ull;
    if (!PyLong_Check(object.ptr()) || PyErr_Occurred()) {
        PyErr_Clear();
        throw nb::value_error((what + ": a noise key is an integer from 0 to 2**64 - 1").c_str());
    }
    return value;
}

// 14 items, or with l2, noise key and noise index 17.
Segment take_segment(nb::handle object, std::size_t index) {
    const std::string what = "segment " + std::to_string(index);
    const bool more = nb::isinstance<nb::tuple>(object) && nb::len(object) > 14;
    const auto items = take_items(object, more ? 17 : 14, what);
    Segment s;
    s.first = take_size(items[0], (what + ": state_elem").c_str());
    s.count = take_size(items[1], (what + ": numel").c_str());
    s.grad = take_offset(items[2], what);
    s.grad_type = take_dtype(items[3], what);
    s.out = take_offset(items[4], what);
    s.out_type = take_dtype(items[5], what);
    nb::list scalars;
    for (std::size_t i = 6; i < (more ? 15 : 14); ++i) scalars.append(items[i]);
    s.scalars = take_scalars(scalars);
    if (more) s.noise = {take_key(items[15], what), take_size(items[16], (what + ": noise index").c_str())};
    return s;
}

nb::object submit(PyStepper& self, nb::handle elements, nb::handle segments, nb::handle grads, nb::handle src,
                  nb::handle dst, nb::handle state, nb::handle out, nb::handle out_file, nb::handle out_first,
                  nb::handle format, nb::handle params, nb::handle due, bool early) {
    Record record;
    record.format = format.is_none() ? self.core->format() : take_format(format);
    std::vector<Array> keep;
    record.elements = take_size(elements, "elements");
    std::size_t index = 0;
    for (nb::handle segment : nb::iter(segments)) record.segments.push_back(take_segment(segment, index++));
    keep.push_back(take_array(grads, "grads", {Kind::u8}, false, 1));
    record.grads = keep.back().data;
    record.grads_size = keep.back().count;
    if (!src.is_none()) {
        const auto place = take_items(src, 2, "src");
        record.src = take_place(place[0], place[1], "src");
    }
    if (!dst.is_none()) {
        const auto place = take_items(dst, 2, "dst");
        record.dst = take_place(place[0], place[1], "dst");
    }
    if (!state.is_none()) {
        keep.push_back(take_array(state, "state", {Kind::u8, Kind::f32}, true, 1));
        const std::uint64_t bytes = self.core->state_bytes(record);
        if (keep.back().nbytes() != bytes)
            throw nb::value_error(("state must have the " + std::to_string(bytes) + " bytes of " +
                                   std::to_string(record.elements) + " elements, not " +
                                   std::to_string(keep.back().nbytes()))
                                      .c_str());
        if (reinterpret_cast<std::uintptr_t>(keep.back().data) % 4 != 0)
            throw nb::value_error("state must start at a multiple of 4 bytes");
        record.state = keep.back().data;
    }
    if (!out.is_none()) {
        keep.push_back(take_array(out, "out", {Kind::u8}, true, 1));
        record.out = keep.back().data;
        record.out_size = keep.back().count;
    }
    if (!params.is_none()) {
        keep.push_back(take_array(params, "params", {Kind::u8}, false, 1));
        if (keep.back().count != record.out_size)
            throw nb::value_error(("params has " + std::to_string(keep.back().count) + " bytes, out has " +
                                   std::to_string(record.out_size))
                                      .c_str());
        record.params = keep.back().data;
    }
    if (!out_file.is_none()) {
        const auto place = take_items(out_file, 3, "out_file");
        record.out_file = take_place(place[0], place[1], "out_file");
        record.out_bytes = take_size(place[2], "out_file nbytes");
    }
    record.out_first = take_size(out_first, "out_first");
    record.due = take_size(due, "due");
    auto& engine = nb::cast<PyEngine&>(self.engine_object);
    std::shared_ptr<Ticket> updated;
    auto ticket = self.core->submit(std::move(record), early ? &updated : nullptr);
    nb::object whole = engine.track(std::move(ticket), std::move(keep));
    if (!early) return whole;
    return nb::make_tuple(std::move(whole), engine.track(std::move(updated), {}));
}

}  // namespace

void bind_stepper(nb::module_& m) {
    nb::class_<PyStepper>(m, "Stepper")
        .def(
            "__init__",
            [](PyStepper* self, nb::object engine, nb::handle buffers, nb::handle chunk, nb::handle threads,
               nb::handle format) {
                PyEngine* found = nullptr;
                if (!nb::try_cast(engine, found) || found == nullptr)
                    throw nb::type_error("engine must be an Engine");
                Array array = take_array(buffers, "buffers", {Kind::u8}, true, 1);
                const std::uint64_t elements = take_size(chunk, "chunk");
                const std::uint64_t n = std::min<std::uint64_t>(take_size(threads, "threads"), 1u << 20);
                auto core = std::make_unique<Stepper>(found->core, array.data, array.count, elements,
                                                      static_cast<unsigned>(n), take_format(format));
                new (self) PyStepper(std::move(engine), std::move(array), std::move(core));
            },
            nb::arg("engine"), nb::arg("buffers"), nb::arg("chunk"), nb::arg("threads") = 1, nb::kw_only(),
            nb::arg("format").none() = nb::none())
        .def("submit", &submit, nb::arg("elements"), nb::arg("segments"), nb::arg("grads"), nb::kw_only(),
             nb::arg("src").none() = nb::none(), nb::arg("dst").none() = nb::none(),
             nb::arg("state").none() = nb::none(), nb::arg("out").none() = nb::none(),
             nb::arg("out_file").none() = nb::none(), nb::arg("out_first") = 0,
             nb::arg("format").none() = nb::none(), nb::arg("params").none() = nb::none(), nb::arg("due") = 0,
             nb::arg("early") = false)
        .def_prop_ro("appetite", [](const PyStepper& self) { return self.core->appetite(); })
        .def("close", [](PyStepper& self) { self.close(); });
}

}  // namespace tz

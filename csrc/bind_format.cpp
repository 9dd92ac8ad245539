// State formats: their sizes, and whole records to and from float32 planes.
#include <algorithm>
#include <functional>

#include "bind.hpp"
#include "state_update.hpp"

namespace tz {

namespace {

constexpr const char* kSentence =
    "a state format is (master \"f32\"|\"split\"|\"none\", exp_avg, exp_avg_sq \"f32\"|\"bf16\"|\"u8\", "
    "amsgrad)";

Moment take_moment(nb::handle object) {
    const auto name = nb::cast<std::string>(nb::str(object));
    if (name == "f32") return Moment::f32;
    if (name == "bf16") return Moment::bf16;
    if (name == "u8") return Moment::u8;
    throw nb::value_error(kSentence);
}

std::uint64_t take_chunk(nb::handle object) {
    const std::uint64_t chunk = take_size(object, "chunk");
    if (chunk == 0 || chunk % 2048 != 0 || chunk > (std::uint64_t{1} << 40))
        throw nb::value_error("chunk must be a positive multiple of 2048 elements");
    return chunk;
}

std::uint64_t take_elements(nb::handle object) {
    const std::uint64_t elements = take_size(object, "elements");
    if (elements == 0 || elements % 1024 != 0 || elements > (std::uint64_t{1} << 56))
        throw nb::value_error("elements must be a positive multiple of 1024");
    return elements;
}

std::uint64_t py_state_bytes(nb::handle format, nb::handle elements, nb::handle chunk) {
    return take_format(format).record_bytes(take_elements(elements), take_chunk(chunk));
}

nb::dict py_state_parts(nb::handle format, nb::handle elements) {
    const std::uint64_t n = take_elements(elements);
    const StateLayout layout = take_format(format).layout(n);
    const char* names[] = {"master",           "exp_avg", "exp_avg_scale",  "exp_avg_sq",
                           "exp_avg_sq_scale", "ties",    "max_exp_avg_sq", "max_exp_avg_sq_scale"};
    nb::dict out;
    for (std::size_t i = 0; i < layout.streams().size(); ++i) {
        const Stream& stream = *layout.streams()[i];
        if (stream.size) out[names[i]] = nb::make_tuple(stream.offset, stream.bytes(n));
    }
    return out;
}

// The arrays of pack_state and unpack_state, checked against each other.
struct Whole {
    Whole(nb::handle format_, nb::handle chunk_, nb::handle state_, nb::handle p, nb::handle exp_avg,
          nb::handle exp_avg_sq, nb::handle max_exp_avg_sq, nb::handle params_, bool pack)
        : format(take_format(format_)),
          chunk(take_chunk(chunk_)),
          state(take_array(state_, "state", {Kind::u8}, pack, 1)) {
        const auto plane = [&](nb::handle object, const char* name) {
            planes.push_back(take_array(object, name, {Kind::f32}, !pack, 1));
            if (planes.back().count != planes.front().count)
                throw nb::value_error((std::string(name) + " and p differ in size").c_str());
        };
        plane(p, "p");
        plane(exp_avg, "exp_avg");
        plane(exp_avg_sq, "exp_avg_sq");
        if (format.amsgrad == max_exp_avg_sq.is_none())
            throw nb::value_error("max_exp_avg_sq goes with a format with amsgrad");
        if (format.amsgrad) plane(max_exp_avg_sq, "max_exp_avg_sq");
        const std::uint64_t n = planes.front().count;
        if (n == 0 || n % 1024 != 0)
            throw nb::value_error("p must have a positive multiple of 1024 elements");
        if (state.count != format.record_bytes(n, chunk))
            throw nb::value_error(("state must have " + std::to_string(format.record_bytes(n, chunk)) +
                                   " bytes, not " + std::to_string(state.count))
                                      .c_str());
        if (reinterpret_cast<std::uintptr_t>(state.data) % 4 != 0)
            throw nb::value_error("state must start at a multiple of 4 bytes");
        if ((format.master == Master::f32) != params_.is_none())
            throw nb::value_error("params go with a format without a float32 master");
        if (format.master == Master::f32) return;
        params =
            take_array(params_, "params", {format.master == Master::split ? Kind::bf16 : Kind::f32}, pack, 1);
        if (params.count != n) throw nb::value_error("params and p differ in size");
    }

    // body(chunk's state, its layout, first element, elements, planes, params)
    void each(const std::function<void(char*, const StateLayout&, std::uint64_t, const Planes32&, char*)>&
                  body) const {
        nb::gil_scoped_release release;
        const std::uint64_t n = planes.front().count;
        char* at = state.data;
        for (std::uint64_t first = 0; first < n; first += chunk) {
            const std::uint64_t count = std::min(chunk, n - first);
            const StateLayout layout = format.layout(count);
            float* planes_at[4] = {};
            for (std::size_t i = 0; i < planes.size(); ++i)
                planes_at[i] = reinterpret_cast<float*>(planes[i].data) + first;
            body(at, layout, count, {planes_at[0], planes_at[1], planes_at[2], planes_at[3]},
                 params.data ? params.data + first * kind_size(params.kind) : nullptr);
            at += layout.bytes;
        }
    }

    StateFormat format;
    std::uint64_t chunk;
    Array state, params;
    std::vector<Array> planes;
};

void py_pack_state(nb::handle format, nb::handle chunk, nb::handle state, nb::handle p, nb::handle exp_avg,
                   nb::handle exp_avg_sq, nb::handle max_exp_avg_sq, nb::handle params) {
    const Whole whole(format, chunk, state, p, exp_avg, exp_avg_sq, max_exp_avg_sq, params, true);
    whole.each([&](char* at, const StateLayout& layout, std::uint64_t n, const Planes32& planes, char* copy) {
        pack_stretch(whole.format, layout, at, 0, n, planes, copy);
        std::memset(at + layout.used, 0, layout.bytes - layout.used);
    });
}

void py_unpack_state(nb::handle format, nb::handle chunk, nb::handle state, nb::handle p, nb::handle exp_avg,
                     nb::handle exp_avg_sq, nb::handle max_exp_avg_sq, nb::handle params) {
    const Whole whole(format, chunk, state, p, exp_avg, exp_avg_sq, max_exp_avg_sq, params, false);
    whole.each([&](char* at, const StateLayout& layout, std::uint64_t n, const Planes32& planes, char* copy) {
        unpack_stretch(whole.format, layout, at, 0, n, copy, planes);
    });
}

}  // namespace

StateFormat take_format(nb::handle object) {
    StateFormat out;
    if (object.is_none()) return out;
    if (!nb::isinstance<nb::tuple>(object) || nb::len(object) != 4) throw nb::value_error(kSentence);
    const auto master = nb::cast<std::string>(nb::str(object[0]));
    if (master == "split")
        out.master = Master::split;
    else if (master == "none")
        out.master = Master::none;
    else if (master != "f32")
        throw nb::value_error(kSentence);
    out.avg = take_moment(object[1]);
    out.sq = take_moment(object[2]);
    const nb::object amsgrad = object[3];
    if (!nb::isinstance<nb::bool_>(amsgrad)) throw nb::value_error(kSentence);
    out.amsgrad = nb::cast<bool>(amsgrad);
    return out;
}

void bind_format(nb::module_& m) {
    m.def("state_bytes", &py_state_bytes, nb::arg("format").none(), nb::arg("elements"), nb::arg("chunk"));
    m.def("state_parts", &py_state_parts, nb::arg("format").none(), nb::arg("elements"));
    for (const auto& [name, function] :
         {std::pair{"pack_state", &py_pack_state}, {"unpack_state", &py_unpack_state}})
        m.def(name, function, nb::arg("format").none(), nb::arg("chunk"), nb::arg("state"), nb::arg("p"),
              nb::arg("exp_avg"), nb::arg("exp_avg_sq"), nb::arg("max_exp_avg_sq").none() = nb::none(),
              nb::arg("params").none() = nb::none());
}

}  // namespace tz

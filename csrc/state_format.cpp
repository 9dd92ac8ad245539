#include "state_format.hpp"

namespace tz {

StateLayout StateFormat::layout(std::uint64_t elements) const {
    StateLayout out;
    const auto place = [&](Stream& stream, std::uint64_t per, std::uint64_t size) {
        stream = {out.used, per, size};
        out.used += stream.bytes(elements);
    };
    const auto moment = [&](Moment kind, Stream& values, Stream& scales) {
        place(values, 1, kind == Moment::f32 ? 4 : kind == Moment::bf16 ? 2 : 1);
        if (kind == Moment::u8) place(scales, kBlock, 4);
    };
    if (master != Master::none) place(out.master, 1, master == Master::f32 ? 4 : 2);
    moment(avg, out.avg, out.avg_scale);
    moment(sq, out.sq, out.sq_scale);
    if (master == Master::split && sq == Moment::u8) place(out.ties, 8, 1);
    if (amsgrad) moment(sq, out.max, out.max_scale);
    out.bytes = round_up(out.used, kPage);
    return out;
}

std::uint64_t StateFormat::record_bytes(std::uint64_t elements, std::uint64_t chunk) const {
    const std::uint64_t rest = elements % chunk;
    return elements / chunk * chunk_bytes(chunk) + (rest ? chunk_bytes(rest) : 0);
}

}  // namespace tz

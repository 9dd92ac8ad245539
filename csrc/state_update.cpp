#include "state_update.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "adam_element.hpp"
#include "state_codec.hpp"

namespace tz {

namespace {

constexpr std::size_t kTurn =
    4 * kBlock;  // elements decoded at a time: 20 KiB of float32 stay in the first cache

constexpr auto kNearest = [] {
    std::array<std::uint32_t, kTurn> out{};
    for (auto& word : out) word = 0x80008000u;
    return out;
}();

std::uint16_t* words(char* p) {
    return reinterpret_cast<std::uint16_t*>(p);
}

// One moment of a stretch: its values are in `scratch` between load() and store(), or stay where they are.
struct MomentPart {
    Moment kind;
    bool square;
    char* values;
    char* scales;
    float* scratch;

    float* load(const StateCodec& codec, std::size_t n) const {
        if (kind == Moment::f32) return reinterpret_cast<float*>(values);
        if (kind == Moment::bf16) {
            codec.widen(words(values), scratch, n);
            return scratch;
        }
        for (std::size_t i = 0; i < n; i += kBlock) {
            float scale;
            std::memcpy(&scale, scales + i / kBlock * 4, 4);
            const auto* codes = reinterpret_cast<const std::uint8_t*>(values) + i;
            (square ? codec.square_values : codec.signed_values)(codes, scale, scratch + i,
                                                                 std::min(kBlock, n - i));
        }
        return scratch;
    }

    void store(const StateCodec& codec, std::size_t n, const std::uint32_t* noise, unsigned shift) const {
        if (kind == Moment::f32) return;
        if (kind == Moment::bf16) return codec.narrow(scratch, words(values), noise, shift, n);
        for (std::size_t i = 0; i < n; i += kBlock) {
            float scale;
            auto* codes = reinterpret_cast<std::uint8_t*>(values) + i;
            (square ? codec.square_codes : codec.signed_codes)(scratch + i, codes, &scale, noise + i, shift,
                                                               std::min(kBlock, n - i));
            std::memcpy(scales + i / kBlock * 4, &scale, 4);
        }
    }
};

// The bits beside u8 codes that stand for the sign of a float32 exp_avg_sq.
void load_ties(const char* bits, float* sq, std::size_t n) {
    for (std::size_t i = 0; i < n; ++i)
        if ((static_cast<unsigned char>(bits[i / 8]) >> (i % 8)) & 1u) sq[i] = -sq[i];
}

void store_ties(const float* sq, char* bits, std::size_t n) {
    for (std::size_t i = 0; i < n; i += 8) {
        unsigned byte = 0;
        for (std::size_t j = i; j < std::min(i + 8, n); ++j)
            byte |= (std::signbit(sq[j]) ? 1u : 0u) << (j - i);
        bits[i / 8] = static_cast<char>(byte);
    }
}

// The decoded values of up to kTurn elements.
struct Turn {
    Turn(const StateFormat& format_, const StateLayout& layout_, char* state, std::uint64_t at,
         std::size_t n_)
        : format(format_),
          n(n_),
          master(state + layout_.master.at(at)),
          ties(layout_.ties.size ? state + layout_.ties.at(at) : nullptr),
          avg{format_.avg, false, state + layout_.avg.at(at), state + layout_.avg_scale.at(at), scratch[1]},
          sq{format_.sq, true, state + layout_.sq.at(at), state + layout_.sq_scale.at(at), scratch[2]},
          max{format_.sq, true, state + layout_.max.at(at), state + layout_.max_scale.at(at), scratch[3]} {}

    void load(const char* params) {
        m = avg.load(codec, n);
        v = sq.load(codec, n);
        if (ties) load_ties(ties, v, n);
        x = format.amsgrad ? max.load(codec, n) : nullptr;
        p = format.master == Master::f32 ? reinterpret_cast<float*>(master) : scratch[0];
        if (format.master == Master::split) codec.join(params, words(master), v, p, n);
        if (format.master == Master::none) std::memcpy(p, params, 4 * n);
    }

    void store(const std::uint32_t* noise) const {
        if (format.master == Master::split) codec.cut(p, words(master), v, n);
        if (ties) store_ties(v, ties, n);
        avg.store(codec, n, noise, 0);
        sq.store(codec, n, noise, 16);
        if (format.amsgrad) max.store(codec, n, kNearest.data(), 0);
    }

    const StateCodec& codec = state_codec();
    const StateFormat& format;
    const std::size_t n;
    alignas(64) float scratch[4][kTurn];
    char *master, *ties;
    MomentPart avg, sq, max;
    float *p = nullptr, *m = nullptr, *v = nullptr, *x = nullptr;
};

}  // namespace

void update_stretch(const StateFormat& format, const StateLayout& layout, const Stretch& s,
                    const AdamTypes& types, const AdamScalars& scalars) {
    const AdamKernel kernel = adam_kernel(types);
    const auto floats = [&](const Stream& stream) {
        return reinterpret_cast<float*>(s.state + stream.at(s.at));
    };
    if (format.plain())
        return kernel({floats(layout.master), floats(layout.avg), floats(layout.sq),
                       types.amsgrad ? floats(layout.max) : nullptr, s.grad, s.out},
                      s.count, scalars);
    const bool noisy = format.avg != Moment::f32 || format.sq != Moment::f32;
    const std::size_t param_size = format.master == Master::none ? 4 : 2;
    for (std::size_t done = 0; done < s.count; done += kTurn) {
        const std::size_t n = std::min(kTurn, s.count - done);
        Turn turn(format, layout, s.state, s.at + done, n);
        turn.load(s.params ? s.params + done * param_size : nullptr);
        kernel({turn.p, turn.m, turn.v, turn.x, s.grad + done * size_of(types.grad),
                types.has_out ? s.out + done * size_of(types.out) : nullptr},
               n, scalars);
        std::uint32_t noise[kTurn];
        if (noisy) turn.codec.noise(s.noise.key, s.noise.first + done, noise, n);
        turn.store(noise);
    }
}

void pack_stretch(const StateFormat& format, const StateLayout& layout, char* state, std::uint64_t at,
                  std::size_t count, const Planes32& from, char* params) {
    for (std::size_t done = 0; done < count; done += kTurn) {
        const std::size_t n = std::min(kTurn, count - done);
        Turn turn(format, layout, state, at + done, n);
        turn.p = format.master == Master::f32 ? reinterpret_cast<float*>(turn.master) : turn.scratch[0];
        turn.m = format.avg == Moment::f32 ? reinterpret_cast<float*>(turn.avg.values) : turn.scratch[1];
        turn.v = format.sq == Moment::f32 ? reinterpret_cast<float*>(turn.sq.values) : turn.scratch[2];
        turn.x = format.sq == Moment::f32 ? reinterpret_cast<float*>(turn.max.values) : turn.scratch[3];
        std::memcpy(turn.p, from.p + done, 4 * n);
        std::memcpy(turn.m, from.m + done, 4 * n);
        std::memcpy(turn.v, from.v + done, 4 * n);
        if (format.amsgrad) std::memcpy(turn.x, from.x + done, 4 * n);
        if (format.master == Master::split) cast_floats(turn.p, params + 2 * done, Dtype::bf16, n);
        if (format.master == Master::none) std::memcpy(params + 4 * done, turn.p, 4 * n);
        turn.store(kNearest.data());
    }
}

void unpack_stretch(const StateFormat& format, const StateLayout& layout, const char* state, std::uint64_t at,
                    std::size_t count, const char* params, const Planes32& to) {
    const std::size_t param_size = format.master == Master::none ? 4 : 2;
    for (std::size_t done = 0; done < count; done += kTurn) {
        const std::size_t n = std::min(kTurn, count - done);
        // Of the state nothing is written, but the sign of exp_avg_sq when it holds a tie: that goes to a
        // copy.
        Turn turn(format, layout, const_cast<char*>(state), at + done, n);
        if (format.master == Master::split && format.sq == Moment::f32) {
            std::memcpy(turn.scratch[2], turn.sq.values, 4 * n);
            turn.sq.values = reinterpret_cast<char*>(turn.scratch[2]);
        }
        turn.load(params ? params + done * param_size : nullptr);
        std::memcpy(to.p + done, turn.p, 4 * n);
        std::memcpy(to.m + done, turn.m, 4 * n);
        std::memcpy(to.v + done, turn.v, 4 * n);
        if (format.amsgrad) std::memcpy(to.x + done, turn.x, 4 * n);
    }
}

}  // namespace tz

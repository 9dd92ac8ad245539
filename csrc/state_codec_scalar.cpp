// The portable codecs.
#include <bit>
#include <cstring>

#include "noise.hpp"
#include "state_codec.hpp"

namespace tz {

namespace {

#define TZ_TARGET
#include "state_codec.inc"

}  // namespace

const StateCodec& state_codec_scalar() {
    return kCodec;
}

const StateCodec& state_codec(Isa isa) {
    switch (isa) {
        case Isa::avx2:
            return state_codec_avx2();
        case Isa::avx512:
            return state_codec_avx512();
        default:
            return state_codec_scalar();
    }
}

const StateCodec& state_codec() {
    return state_codec(isa());
}

}  // namespace tz

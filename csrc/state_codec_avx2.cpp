// The codecs for AVX2.
#include <bit>
#include <cstring>

#include "noise.hpp"
#include "state_codec.hpp"

namespace tz {

#ifdef TZ_X86

namespace {

#define TZ_TARGET TZ_AVX2
#include "state_codec.inc"

}  // namespace

const StateCodec& state_codec_avx2() {
    return kCodec;
}

#else

const StateCodec& state_codec_avx2() {
    return state_codec_scalar();
}

#endif

}  // namespace tz

// The one Zydis decoder, for 64-bit code. Only the files that turn Zydis' view into ours include this.
#pragma once

#include <Zydis/Zydis.h>

namespace sonde::host {

inline const ZydisDecoder& decoder() {
  static const ZydisDecoder made = [] {
    ZydisDecoder d;
    ZydisDecoderInit(&d, ZYDIS_MACHINE_MODE_LONG_64, ZYDIS_STACK_WIDTH_64);
    return d;
  }();
  return made;
}

}  // namespace sonde::host

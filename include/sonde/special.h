/* Tells sonde of code that a stack walk must know by name: hand-written code whose unwind tables say nothing, or less than
   all. For C, C++ and assembly; needs no library, and costs a program 16 bytes of read-only data a range.

     SONDE_SPECIAL(my_switch, my_switch_end, SONDE_SPECIAL_UNRELIABLE)

   at file level. begin and end are symbols (or symbol + number) of the same object file or hidden ones: [begin, end). In C
   and C++ they are the names as the assembler sees them. The ranges lie in the section "sonde_special" of the program or
   library; sonde reads them from there, sorted, before it walks. A range that is empty or lies outside of executable code is
   ignored. What a program says of its code goes before what sonde knows of it by itself.

   SONDE_SPECIAL_UNRELIABLE      A frame in it is never believed: reason special-code. Reliable walks end there.
   SONDE_SPECIAL_OUTERMOST       Nobody called it: a stack that gets there is whole. For the start of threads and coroutines.
   SONDE_SPECIAL_SIGNAL_RETURN   A signal handler returns to its first instruction, with sp at the kernel's signal frame. */
#ifndef SONDE_SPECIAL_H
#define SONDE_SPECIAL_H

#define SONDE_SPECIAL_UNRELIABLE 1
#define SONDE_SPECIAL_OUTERMOST 2
#define SONDE_SPECIAL_SIGNAL_RETURN 3

/* {begin, end, kind, 0}, 32 bits each; begin and end as distances from the words themselves: no relocation at run time. */
#ifdef __ASSEMBLER__
#define SONDE_SPECIAL(begin, end, kind) \
  .pushsection sonde_special, "aR", % progbits; \
  .balign 4; \
  .long(begin) -.; \
  .long(end) -.; \
  .long kind; \
  .long 0; \
  .popsection
#else
#define SONDE_SPECIAL_TEXT_(x) #x
#define SONDE_SPECIAL_TEXT(x) SONDE_SPECIAL_TEXT_(x)
#define SONDE_SPECIAL(begin, end, kind) \
  __asm__(                                                            \
      ".pushsection sonde_special,\"aR\",%progbits\n"                 \
      ".balign 4\n"                                                   \
      ".long (" SONDE_SPECIAL_TEXT(begin) ") - .\n"                   \
      ".long (" SONDE_SPECIAL_TEXT(end) ") - .\n"                     \
      ".long " SONDE_SPECIAL_TEXT(kind) "\n"                          \
      ".long 0\n"                                                     \
      ".popsection\n");
#endif

#endif

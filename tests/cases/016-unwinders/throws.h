// Runs the throwing functions; the number of destructors that have run, or -1 if a result was wrong.
#ifdef __cplusplus
extern "C"
#endif
    __attribute__((visibility("default"))) int run_throws(int rounds);

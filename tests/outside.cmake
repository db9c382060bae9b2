# What everybody else's tools say of a recorded program: stacks by gdb, eu-stack and the unwinders inside, counts by gdb's
# breakpoints, backtraces that the program takes itself in a timer's handler, executions of single instructions by ptrace.
if(TARGET sonde AND NOT SONDE_SANITIZE)
  function(sonde_outside_test name script)
    add_test(NAME ${name} COMMAND Python3::Interpreter ${CMAKE_CURRENT_SOURCE_DIR}/outside/${script}.py
      --work ${CMAKE_BINARY_DIR}/outside/${name} --sonde $<TARGET_FILE:sonde> ${ARGN})
    set_tests_properties(${name} PROPERTIES TIMEOUT 600 SKIP_RETURN_CODE 77)
  endfunction()
  sonde_outside_test(outside_stacks stacks)
  sonde_outside_test(outside_counts counts sqlite3)
  sonde_outside_test(outside_timer timer)
  sonde_outside_test(outside_reasons reasons)
  sonde_outside_test(outside_places places)
  # Minutes: ./dev proof.
  sonde_outside_test(outside_stacks_of_all_subsets stacks --all)
  sonde_outside_test(outside_counts_of_four_programs counts)
  sonde_outside_test(outside_timer_million timer --stacks 1000000)
  add_test(NAME probe_signals_million COMMAND probe_tests -tc=*timer*,*siglongjmp*)
  add_test(NAME record_true_in_time COMMAND ${BATS} --filter "under 0.3 s" ${CMAKE_CURRENT_SOURCE_DIR}/cli/real_programs.bats)
  set_tests_properties(probe_signals_million PROPERTIES ENVIRONMENT "SONDE_SIGNALS=1000000")
  set_tests_properties(record_true_in_time PROPERTIES ENVIRONMENT "SONDE=$<TARGET_FILE:sonde>;SONDE_PROOF=1")
  set_tests_properties(outside_stacks_of_all_subsets outside_counts_of_four_programs outside_timer_million
    probe_signals_million record_true_in_time PROPERTIES LABELS slow TIMEOUT 3600)
endif()

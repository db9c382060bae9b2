# One test per folder of tests/cases: the program alone and under `sonde record`; with SONDE_TRACE_CASES off only alone
# (a sanitized host is not what users run).
option(SONDE_TRACE_CASES "Run the cases under sonde record too" ON)
file(GLOB SONDE_CASES RELATIVE ${CMAKE_CURRENT_SOURCE_DIR}/cases CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/cases/*/build.sh)
foreach(script ${SONDE_CASES})
  get_filename_component(case ${script} DIRECTORY)
  string(SUBSTRING ${case} 0 3 number)
  set(command Python3::Interpreter ${CMAKE_CURRENT_SOURCE_DIR}/cases/run.py --work ${CMAKE_BINARY_DIR}/cases ${case})
  if(SONDE_TRACE_CASES)
    list(APPEND command --traced --sonde $<TARGET_FILE:sonde>)
  endif()
  add_test(NAME case_${number} COMMAND ${command})
  set_tests_properties(case_${number} PROPERTIES LABELS case TIMEOUT 300 SKIP_RETURN_CODE 77)
endforeach()

if(SONDE_TRACE_CASES)
  add_test(NAME installed COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/install_test.sh ${CMAKE_BINARY_DIR})
endif()

# What `sonde stack` says of them, by core files that gdb takes where each case is about: the number is the case's.
if(SONDE_TRACE_CASES)
  foreach(number 048 050 051 052 055 056 059 061)
    add_test(NAME case_${number}_stacks COMMAND Python3::Interpreter ${CMAKE_CURRENT_SOURCE_DIR}/cases/stacks.py
      --work ${CMAKE_BINARY_DIR}/cases --sonde $<TARGET_FILE:sonde> ${number})
    # Both build the case.
    set_tests_properties(case_${number}_stacks PROPERTIES LABELS case TIMEOUT 600 SKIP_RETURN_CODE 77 DEPENDS case_${number})
  endforeach()
endif()

# Minutes: ./dev proof.
if(SONDE_TRACE_CASES)
  set(run Python3::Interpreter ${CMAKE_CURRENT_SOURCE_DIR}/cases/run.py --work ${CMAKE_BINARY_DIR}/cases)
  add_test(NAME cases_with_stacks COMMAND ${run} --traced --sonde $<TARGET_FILE:sonde> --flag=-s)
  add_test(NAME cases_with_sums COMMAND ${run} --traced --sonde $<TARGET_FILE:sonde> --flag=--sum)
  add_test(NAME cases_with_traps COMMAND ${run} --traced --sonde $<TARGET_FILE:sonde> --flag=--force-trap)
  add_test(NAME case_counts_by_gdb COMMAND Python3::Interpreter ${CMAKE_CURRENT_SOURCE_DIR}/cases/gdb_counts.py
    --work ${CMAKE_BINARY_DIR}/cases)
  set_tests_properties(cases_with_stacks cases_with_sums cases_with_traps case_counts_by_gdb PROPERTIES
    LABELS slow TIMEOUT 1200 SKIP_RETURN_CODE 77)
endif()

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

# Two threads at full speed. The long one belongs to ./dev proof.
set(run Python3::Interpreter ${CMAKE_CURRENT_SOURCE_DIR}/speed/speed.py --sonde $<TARGET_FILE:sonde>)
add_test(NAME speed_short COMMAND ${run} --work ${CMAKE_BINARY_DIR}/speed/short --seconds 1)
add_test(NAME speed_ten_seconds COMMAND ${run} --work ${CMAKE_BINARY_DIR}/speed/long --seconds 10)
set_tests_properties(speed_short PROPERTIES TIMEOUT 300 RUN_SERIAL ON)
set_tests_properties(speed_ten_seconds PROPERTIES LABELS slow TIMEOUT 3600 RUN_SERIAL ON)

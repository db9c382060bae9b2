# Golden dumps; ./dev rebase rewrites them.
add_test(NAME golden_dumps COMMAND Python3::Interpreter ${CMAKE_CURRENT_SOURCE_DIR}/golden.py $<TARGET_FILE:sonde> ${CMAKE_BINARY_DIR}/golden)
set_tests_properties(golden_dumps PROPERTIES LABELS golden)

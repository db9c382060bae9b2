# clang cannot compile libstdc++'s headers for general registers only, so in its builds g++ makes the agent, in a build
# folder of its own. Leaves the target sonde_agent and the file where the others are.
add_custom_target(sonde_agent_by_gcc ALL
  COMMAND ${CMAKE_COMMAND} -S ${CMAKE_SOURCE_DIR} -B ${CMAKE_BINARY_DIR}/agent-gcc -G Ninja -DSONDE_AGENT_ONLY=ON
    -DCMAKE_C_COMPILER=gcc -DCMAKE_CXX_COMPILER=g++ -DCMAKE_BUILD_TYPE=${CMAKE_BUILD_TYPE} --log-level=WARNING
  COMMAND ${CMAKE_COMMAND} --build ${CMAKE_BINARY_DIR}/agent-gcc
  COMMAND ${CMAKE_COMMAND} -E copy_if_different ${CMAKE_BINARY_DIR}/agent-gcc/libsonde-agent.so ${CMAKE_BINARY_DIR}
  BYPRODUCTS ${CMAKE_BINARY_DIR}/libsonde-agent.so
  VERBATIM)
add_library(sonde_agent SHARED IMPORTED GLOBAL)
set_target_properties(sonde_agent PROPERTIES IMPORTED_LOCATION ${CMAKE_BINARY_DIR}/libsonde-agent.so)
add_dependencies(sonde_agent sonde_agent_by_gcc)

# What the package's extension and the simulator's have in common: language, MLX, nanobind, and
# `shader`, a header with the shader's text.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release)
endif()

find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module)
execute_process(
  COMMAND "${Python_EXECUTABLE}" -m nanobind --cmake_dir
  OUTPUT_STRIP_TRAILING_WHITESPACE OUTPUT_VARIABLE nanobind_ROOT
  COMMAND_ERROR_IS_FATAL ANY)
find_package(nanobind CONFIG REQUIRED)
execute_process(
  COMMAND "${Python_EXECUTABLE}" -m mlx --cmake-dir
  OUTPUT_STRIP_TRAILING_WHITESPACE OUTPUT_VARIABLE MLX_ROOT
  COMMAND_ERROR_IS_FATAL ANY)
find_package(MLX CONFIG REQUIRED)

cmake_path(GET CMAKE_CURRENT_LIST_DIR PARENT_PATH root)
set(shader ${CMAKE_CURRENT_BINARY_DIR}/verify_draft_source.h)
set(shader_files law.h verify_draft_params.h simd.h noise.h row.h draw.h filter.h verify_draft.h
  kernel.h verify_draft.metal verify_tree.h verify_tree.metal)
list(TRANSFORM shader_files PREPEND ${root}/metal/)
add_custom_command(OUTPUT ${shader}
  COMMAND ${CMAKE_COMMAND} -DNAME=verify_draft_source -DOUTPUT=${shader}
    "-DFILES=${shader_files}" -P ${root}/cmake/embed_shader.cmake
  DEPENDS ${shader_files} ${root}/cmake/embed_shader.cmake VERBATIM)

# Writes OUTPUT: a C++ header with the shader's text, includes resolved, as `const char NAME[]`.
# Run as a script: cmake -DNAME=... -DOUTPUT=... -DFILES=a.h;b.h;main.metal -P embed_shader.cmake
# FILES are in include order, the main file last. Metal's own header stays first.
set(text "#include <metal_stdlib>\nusing namespace metal;\n")
foreach(file IN LISTS FILES)
  file(READ "${file}" part)
  string(REGEX REPLACE "#include [^\n]*\n" "" part "${part}")
  string(REPLACE "#pragma once\n" "" part "${part}")
  string(REPLACE "using namespace metal;\n" "" part "${part}")
  string(APPEND text "${part}")
endforeach()
file(WRITE "${OUTPUT}"
  "#pragma once\n\ninline constexpr char ${NAME}[] = R\"metal(\n${text})metal\";\n")

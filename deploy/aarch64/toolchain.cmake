# Cross-compiles the native step for Arm: apt-get install cmake g++-aarch64-linux-gnu
#   cmake -S . -B build/aarch64/native --toolchain deploy/aarch64/toolchain.cmake
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)

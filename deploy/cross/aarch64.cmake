# Builds the native step for Arm on another machine: g++-aarch64-linux-gnu of Debian and Ubuntu.
#   cmake -S . -B build/aarch64 --toolchain deploy/cross/aarch64.cmake
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)

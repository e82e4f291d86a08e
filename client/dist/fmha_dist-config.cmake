# find_package(fmha_dist) -> fmha::dist, with what it stands on.
include(CMakeFindDependencyMacro)
find_dependency(MPI COMPONENTS C)
find_dependency(fmha_client)
include(${CMAKE_CURRENT_LIST_DIR}/fmha_dist-targets.cmake)

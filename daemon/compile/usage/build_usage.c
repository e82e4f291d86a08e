/* SPDX-License-Identifier: MIT */
#include <compile/build_usage.h>

const struct cli_option build_options[] = {
	{"arch", BUILD_ARCH, "ARCH", "sm_80, sm_90a, gfx90a, gfx942, ...: see `fmhactl archs`"},
	{"profile", BUILD_PROFILE, "P",
	 "only the profile's kernels, by its name or number: see `fmhactl profiles`"},
	{"filter", BUILD_FILTER, "EXPR",
	 "only these, such as \"hdim_q == 128 and data_type == 'bf16'\""},
	{"filter-file", BUILD_FILTER_FILE, "FILE",
	 "a file with such an expression, of any number of lines, with # before comments; may be "
	 "given again; all of them and --filter have to hold"},
	{"set", BUILD_SET, "FILE",
	 "only the kernels that a kernel set declares, as `fmhactl enumerate --set` reads it; may "
	 "be "
	 "given again"},
	{"kernel", BUILD_KERNEL, "NAME",
	 "only this kernel, as --list or `fmhactl plan` prints it; may be given again"},
	{"jobs", BUILD_JOBS, "N", "builds at a time (default: every core)"},
	{"cache", BUILD_CACHE, "DIR",
	 "default /var/cache/fmhad, or $XDG_CACHE_HOME/fmhad for a user"},
	{"compiler", BUILD_COMPILER, "nvrtc|hiprtc|clang",
	 "default: nvrtc for sm_*, clang for gfx*"},
	{"clang", BUILD_CLANG, "COMMAND", "the clang to run (default: the first found)"},
	{"linker", BUILD_LINKER, "COMMAND",
	 "the ld.lld that links for a clang which cannot (default: clang links)"},
	{"sources", BUILD_SOURCES, "DIR",
	 "folder of the kernel sources (default: where they are installed)"},
	{"helper", BUILD_HELPER, "FILE", "fmhad-compile (default: where it is installed)"},
	{"library-path", BUILD_LIBRARY_PATH, "DIRS",
	 "where NVRTC or hipRTC lies, if ldconfig does not know; as in LD_LIBRARY_PATH"},
	{"pack", BUILD_PACK, "FILE", "afterwards, pack the whole cache into one file to ship"},
	{"list", BUILD_LIST, NULL, "print the kernels' names, compile nothing"},
	{"spills-fail", BUILD_SPILLS, NULL, "a kernel that spills registers counts as failed"},
	CLI_END};

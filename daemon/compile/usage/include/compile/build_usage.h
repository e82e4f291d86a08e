/* SPDX-License-Identifier: MIT */
/* build_usage.h: the command line of fmhad-build, which fmhactl documents as `fmhactl build`. */
#ifndef COMPILE_BUILD_USAGE_H
#define COMPILE_BUILD_USAGE_H

#include <cli/options.h>

enum build_option {
	BUILD_ARCH = 1,
	BUILD_PROFILE,
	BUILD_FILTER,
	BUILD_KERNEL,
	BUILD_JOBS,
	BUILD_CACHE,
	BUILD_COMPILER,
	BUILD_CLANG,
	BUILD_LINKER,
	BUILD_SOURCES,
	BUILD_HELPER,
	BUILD_LIBRARY_PATH,
	BUILD_PACK,
	BUILD_LIST,
	BUILD_SPILLS,
	BUILD_SET,
	BUILD_FILTER_FILE
};

extern const struct cli_option build_options[];

#define BUILD_USAGE                                                                                \
	{                                                                                          \
		.name = "fmhactl build",                                                           \
		.brief = "compile an arch's kernels into a cache (no daemon, no GPU)",             \
		.synopsis = "--arch ARCH [OPTION...]",                                             \
		.text = "Compiles the kernels of an arch into a cache. Needs the arch's "          \
			"compiler, no "                                                            \
			"GPU and no daemon; what is in the cache already is not built again.\n\n"  \
			"exit codes: 0 all built, 1 some failed, 2 usage, 5 files",                \
		.tables = {                                                                        \
			build_options                                                              \
		}                                                                                  \
	}

#endif

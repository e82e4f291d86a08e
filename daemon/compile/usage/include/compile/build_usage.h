/* SPDX-License-Identifier: MIT */
/* build_usage.h: the command line of fmhad-build, which fmhactl documents as `fmhactl build`. */
#ifndef COMPILE_BUILD_USAGE_H
#define COMPILE_BUILD_USAGE_H

#include <cli/options.h>

#define BUILD_MOST_FILES 16

/* What a command line says; texts that it lacks are NULL, or what they were before. */
struct build_request {
	const char *arch, *profile, *filter, *cache, *compiler, *clang, *linker, *sources, *helper;
	const char *library_path, *pack;
	struct cli_texts filter_files, sets, kernels;
	int64_t jobs;
	bool list, spills_fail;
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

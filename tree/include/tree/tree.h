/* SPDX-License-Identifier: MIT */
/*
 * tree.h: where the files are that belong to this program. They are found from the program itself,
 * so that an installed tree may lie anywhere and be moved, and a build tree, which is laid out the
 * same way, never reads an installed one's.
 */
#ifndef TREE_TREE_H
#define TREE_TREE_H

#include <stddef.h>

enum tree_folder {
	TREE_PROGRAMS, /* bin */
	TREE_DATA,     /* share/fmhad: specs, kernel sources */
	TREE_HELPERS,  /* libexec/fmhad: programs that people do not start */
	TREE_MODULES,  /* lib/fmhad: devices' backends */
};

/* The path of @name in @folder, whether or not it exists. Return: @path. */
const char *tree_path(enum tree_folder folder, const char *name, char *path, size_t size);

#endif

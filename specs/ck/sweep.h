/* SPDX-License-Identifier: MIT */
/* sweep.h: how a configuration that thins out a space is found and read. */
#ifndef SPECS_SWEEP_H
#define SPECS_SWEEP_H

#include "space_read.h"

/* @name: a file's path, or the name of a shipped sweep. Given. Return: 0, FMHA_ENOMEM. */
int sweep_find_file(const struct spec_catalog *catalog, const char *name, char **ret_path,
		    struct fmha_error *err);
int sweep_read(const struct spec_catalog *catalog, const struct at *document, struct sweep *ret,
	       struct fmha_error *err);

#endif

/* SPDX-License-Identifier: MIT */
#ifndef FMHAD_CHECK_H
#define FMHAD_CHECK_H

#include <base/config.h>

/*
 * Whether this machine has what @config, read from @path, names; what it lacks is logged, what it has
 * printed. Nothing is opened, made or changed. Return: 0, -1: something is lacking.
 */
int check_configuration(const struct config *config, const char *path);

#endif

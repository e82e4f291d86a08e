/* SPDX-License-Identifier: MIT */
#ifndef CTL_STATUS_VIEW_H
#define CTL_STATUS_VIEW_H

#include <stdbool.h>

#include <cjson/cJSON.h>

/* Prints the answer to method status. @all_limits: those that nobody ran into, too. */
void status_view(const cJSON *status, bool all_limits);

#endif

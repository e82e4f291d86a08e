/* SPDX-License-Identifier: MIT */
#ifndef FMHAD_WORKER_MAIN_H
#define FMHAD_WORKER_MAIN_H

/* The whole process: fds 3 and 4 are set up by the front. Return: exit status. */
int worker_main(void);

#endif

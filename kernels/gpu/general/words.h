/* SPDX-License-Identifier: MIT */
/* words.h: the one thing that host and device know of words.hip. */
#ifndef FMHA_GPU_WORDS_H
#define FMHA_GPU_WORDS_H

#define WORD_THREADS 32 /* one wave of either kind; GPU_WORD_THREADS to the host */

#endif

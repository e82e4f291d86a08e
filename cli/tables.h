/* SPDX-License-Identifier: MIT */
/* tables.h: walking a usage's tables. */
#ifndef CLI_TABLES_H
#define CLI_TABLES_H

#include <stddef.h>

#include <cli/options.h>

extern const struct cli_option cli_standard[];

/* All zero: the beginning. */
struct cli_cursor {
	size_t table, index, standard;
};

/* The next option, cli_standard's last; NULL after all. */
const struct cli_option *cli_each_option(const struct cli_usage *usage, struct cli_cursor *cursor);

bool cli_has_short(const struct cli_usage *usage, const struct cli_option *option);

/* "ping" of "fmhactl ping". */
const char *cli_command_word(const struct cli_usage *usage);

/* values.c: how long the program's name is in the usage's, and what help and complaints write before an option's name. */
int cli_program_width(const struct cli_usage *usage);
const char *cli_dashes(const struct cli_usage *usage, const struct cli_option *option);
/* Which of "a|b|c" or "[a|b|c]" @word is, from 0 on; -1: none. */
int cli_word_number(const char *words, const char *word);

/* complete.c */
void cli_complete_bash(const struct cli_program *program, FILE *out);
void cli_complete_zsh(const struct cli_program *program, FILE *out);
void cli_complete_fish(const struct cli_program *program, FILE *out);

#endif

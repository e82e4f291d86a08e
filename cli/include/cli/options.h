/* SPDX-License-Identifier: MIT */
/*
 * options.h: command lines as data. One table of options parses them, prints --help, completes them
 * in shells and makes their part of a manual page, so that none of these can lack one.
 */
#ifndef CLI_OPTIONS_H
#define CLI_OPTIONS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <unistd.h> /* optarg, optind */

#define CLI_TABLES  8
#define CLI_EXIT_IO 5 /* of --help and --version when stdout cannot be written */

enum cli_kind {
	CLI_CALLERS, /* cli_next() returns the option's id, and its caller sees to the value */
	CLI_TEXT,    /* const char *: as it is, borrowed */
	CLI_TEXTS,   /* struct cli_texts: one more, up to most */
	CLI_FLAG,    /* bool: true; the option takes no value */
	CLI_INT,     /* int64_t, from least to most */
	CLI_REAL,    /* double, likewise */
	CLI_WORD,    /* uint32_t: which of the argument's words, from 0 on */
};

#define CLI_MOST_TEXTS 256
struct cli_texts {
	uint32_t n;
	const char *at[CLI_MOST_TEXTS]; /* borrowed */
};

/* What becomes of an option's value: it is kept in a struct of the caller's, @at bytes from its beginning. */
struct cli_value {
	enum cli_kind kind;
	size_t at;
	double least, most;
};
#define CLI_OWN                                                                                    \
	{                                                                                          \
		CLI_CALLERS, 0, 0, 0                                                               \
	}
#define CLI_TO(kind, type, member)                                                                 \
	{                                                                                          \
		CLI_##kind, offsetof(type, member), 0, 0                                           \
	}
#define CLI_RANGE(kind, type, member, least, most)                                                 \
	{                                                                                          \
		CLI_##kind, offsetof(type, member), (double)(least), (double)(most)                \
	}

struct cli_option {
	const char *name; /* without dashes */
	int id; /* what cli_next() returns, if it is the caller's; a letter or digit is the short form, too */
	const char
		*argument; /* what its value is called: FILE and PATH are completed as such, a|b|c
				 as these words, but for those in capitals; in [ ]: it may be left
				 out; NULL: it takes none */
	const char *help;  /* no newline */
	struct cli_value value;
};
#define CLI_END                                                                                    \
	{                                                                                          \
		NULL, 0, NULL, NULL, CLI_OWN                                                       \
	}

/* One command, or a program that has none. --help (-h) and --version (-V) are always there. */
struct cli_usage {
	const char *name;     /* "fmhactl ping" */
	const char *brief;    /* one line */
	const char *synopsis; /* what follows the name; one form a line */
	const char *text;     /* paragraphs; lines that begin with a space stay as they are */
	const char *operands; /* as cli_option.argument, for completion; NULL: none */
	const struct cli_option *tables[CLI_TABLES]; /* each up to CLI_END; NULL after the last */
	bool in_order;  /* what follows the first operand is somebody else's */
	bool long_only; /* one dash begins a name, too, as in -b=2 */
};

/* A program with commands; those come after its own options. */
struct cli_program {
	const struct cli_usage *usage;
	const struct cli_usage *const *commands; /* NULL after the last; NULL: it has none */
	/* Values called so (cli_option.argument) are the first words of what this command prints. */
	const char *listed, *lister;
};

/*
 * As getopt_long(), whose optarg and optind it sets; '?' after a complaint on stderr. Options whose values are
 * kept are kept in @to, and the next one that is the caller's is returned. Never returns from --help and --version,
 * which end the process.
 */
int cli_next(const struct cli_usage *usage, int argc, char **argv, void *to);

/* Keeps @text, NULL where there is none, as @option says. Return: 0, or -1 after a complaint on stderr. */
int cli_keep(const struct cli_usage *usage, const struct cli_option *option, const char *text,
	     void *to);

void cli_print_help(const struct cli_usage *usage, FILE *out);
/* Breaks lines at 90 columns, the first of them being at @column already. */
void cli_print_wrapped(const char *text, int column, int indent, FILE *out);

/*
 * Writes the program's options and commands as @format: man (roff: sections and paragraphs, for a
 * page's template), bash, zsh or fish. Return: false: there is no such format.
 */
bool cli_document(const struct cli_program *program, const char *format, FILE *out);
/* @text as roff of a manual page: paragraphs, escapes. */
void cli_print_roff(const char *text, FILE *out);

#endif

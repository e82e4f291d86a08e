/* SPDX-License-Identifier: MIT */
#include "tables.h"

#include <assert.h>
#include <ctype.h>
#include <getopt.h>
#include <stdlib.h>
#include <string.h>

#define MAX_OPTIONS 192
#define WIDTH       90
#define HELP_COLUMN 26

const struct cli_option cli_standard[] = {{"help", 'h', NULL, "this text", CLI_OWN},
					  {"version", 'V', NULL, "the version", CLI_OWN},
					  CLI_END};

const struct cli_option *cli_each_option(const struct cli_usage *usage, struct cli_cursor *cursor)
{
	const struct cli_option *option;

	while (cursor->table < CLI_TABLES && usage->tables[cursor->table]) {
		option = &usage->tables[cursor->table][cursor->index++];
		if (option->name)
			return option;
		cursor->table++;
		cursor->index = 0;
	}
	option = &cli_standard[cursor->standard];
	if (!option->name)
		return NULL;
	cursor->standard++;
	return option;
}

/* A name of one letter takes it from the short forms. */
const char *cli_command_word(const struct cli_usage *usage)
{
	const char *space = strrchr(usage->name, ' ');

	return space ? space + 1 : usage->name;
}

bool cli_has_short(const struct cli_usage *usage, const struct cli_option *option)
{
	const struct cli_option *other;
	struct cli_cursor cursor = {0};

	if (option->id <= 0 || option->id >= 128 || !isalnum(option->id))
		return false;
	while ((other = cli_each_option(usage, &cursor)))
		if (other->name[0] == option->id && !other->name[1])
			return false;
	return true;
}

static _Noreturn void end(int status)
{
	if (fflush(stdout) == 0)
		exit(status);
	(void)fputs("cannot write to stdout\n", stderr);
	exit(CLI_EXIT_IO);
}

/* Whether @word is one of those in "[a|b|c]", the argument that @option may leave out. getopt takes such a one
 * only after "=", but "--lse 1" can mean nothing else. */
static bool is_word_of(const struct cli_option *option, const char *word)
{
	return option->argument && option->argument[0] == '[' &&
	       cli_word_number(option->argument, word) >= 0;
}

/* getopt's numbers of options: as they stand in the tables. Smaller ones are short forms. */
#define FIRST 256

static const struct cli_option *option_of(const struct cli_usage *usage, int number)
{
	const struct cli_option *option;
	struct cli_cursor cursor = {0};

	for (int i = FIRST; (option = cli_each_option(usage, &cursor)); i++)
		if (i == number || (number == option->id && cli_has_short(usage, option)))
			return option;
	return NULL;
}

/* Return: the next option; NULL at the end, with @ret_end getopt's reason. */
static const struct cli_option *next_option(const struct cli_usage *usage, int argc, char **argv,
					    int *ret_end)
{
	struct option options[MAX_OPTIONS];
	char shorts[2 * MAX_OPTIONS + 2];
	const struct cli_option *option;
	struct cli_cursor cursor = {0};
	size_t n = 0, n_shorts = 0;

	if (usage->in_order)
		shorts[n_shorts++] = '+';
	while ((option = cli_each_option(usage, &cursor))) {
		assert(n + 1 < MAX_OPTIONS);
		options[n] = (struct option){option->name,
					     !option->argument            ? no_argument
					     : option->argument[0] == '[' ? optional_argument
									  : required_argument,
					     NULL, FIRST + (int)n};
		n++;
		if (!cli_has_short(usage, option))
			continue;
		shorts[n_shorts++] = (char)option->id;
		if (option->argument)
			shorts[n_shorts++] = ':';
	}
	shorts[n_shorts] = '\0';
	memset(&options[n], 0, sizeof(options[n]));
	*ret_end = usage->long_only ? getopt_long_only(argc, argv, shorts, options, NULL)
				    : getopt_long(argc, argv, shorts, options, NULL);
	option = *ret_end == '?' ? NULL : option_of(usage, *ret_end);
	if (option && !optarg && optind < argc && is_word_of(option, argv[optind]))
		optarg = argv[optind++];
	return option;
}

int cli_next(const struct cli_usage *usage, int argc, char **argv, void *to)
{
	const struct cli_option *option;
	int last;

	while ((option = next_option(usage, argc, argv, &last))) {
		if (option == &cli_standard[0]) {
			cli_print_help(usage, stdout);
			end(0);
		}
		if (option == &cli_standard[1]) {
			(void)printf("%.*s %s\n", cli_program_width(usage), usage->name,
				     FMHA_VERSION);
			end(0);
		}
		if (option->value.kind == CLI_CALLERS)
			return option->id;
		if (cli_keep(usage, option, optarg, to) < 0)
			return '?';
	}
	return last;
}

void cli_print_wrapped(const char *text, int column, int indent, FILE *out)
{
	bool begins = true;

	while (*text) {
		size_t n = strcspn(text, " \n");

		if (!begins && column + 1 + (int)n > WIDTH) {
			(void)fprintf(out, "\n%*s", indent, "");
			column = indent;
			begins = true;
		}
		column += fprintf(out, "%s%.*s", begins ? "" : " ", (int)n, text);
		begins = false;
		text += n;
		if (*text == '\n') {
			(void)fprintf(out, "\n%*s", text[1] ? indent : 0, "");
			column = indent;
			begins = true;
		}
		text += *text != '\0';
	}
	(void)fputc('\n', out);
}

static void print_option(const struct cli_usage *usage, const struct cli_option *option, FILE *out)
{
	int column = 2;

	(void)fputs("  ", out);
	if (cli_has_short(usage, option))
		column += fprintf(out, "-%c, ", option->id);
	else
		column += fprintf(out, "    ");
	column += fprintf(out, "%s%s%s%s", cli_dashes(usage, option), option->name,
			  option->argument ? " " : "", option->argument ? option->argument : "");
	if (column + 2 > HELP_COLUMN)
		(void)fprintf(out, "\n%*s", HELP_COLUMN, "");
	else
		(void)fprintf(out, "%*s", HELP_COLUMN - column, "");
	cli_print_wrapped(option->help, HELP_COLUMN, HELP_COLUMN, out);
}

/* Paragraphs; lines that begin with a space are what they are. */
static void options_print_text(const char *text, FILE *out)
{
	while (*text) {
		size_t n = strcspn(text, "\n");
		char *line = strndup(text, n);

		if (line && *line == ' ')
			(void)fprintf(out, "%s\n", line);
		else if (line)
			cli_print_wrapped(line, 0, 0, out);
		free(line);
		text += n + (text[n] == '\n');
	}
}

void cli_print_help(const struct cli_usage *usage, FILE *out)
{
	const char *form = usage->synopsis;
	const struct cli_option *option;
	struct cli_cursor cursor = {0};
	const char *label = "usage:";

	while (form) {
		char *line = strndup(form, strcspn(form, "\n"));
		int column = fprintf(out, "%s %s ", label, usage->name);

		cli_print_wrapped(line ? line : "", column, column, out);
		free(line);
		label = "      ";
		form = strchr(form, '\n');
		if (form)
			form++;
	}
	(void)fputc('\n', out);
	options_print_text(usage->text, out);
	(void)fputc('\n', out);
	while ((option = cli_each_option(usage, &cursor)))
		print_option(usage, option, out);
}

/* SPDX-License-Identifier: MIT */
/* roff.c: a program's options and commands as a part of its manual page. */
#include "tables.h"

#include <string.h>

static void print_escaped(const char *text, size_t n, FILE *out)
{
	for (size_t i = 0; i < n; i++) {
		if (i == 0 && (text[i] == '.' || text[i] == '\''))
			(void)fputs("\\&", out);
		if (text[i] == '\\')
			(void)fputs("\\e", out);
		else if (text[i] == '-')
			(void)fputs("\\-", out);
		else
			(void)fputc(text[i], out);
	}
}

void cli_print_roff(const char *text, FILE *out)
{
	bool literal = false;

	while (*text) {
		size_t n = strcspn(text, "\n");

		if (n > 0 && (*text == ' ') != literal) {
			(void)fputs(literal ? ".fi\n.PP\n" : ".PP\n.nf\n", out);
			literal = !literal;
		}
		if (n == 0)
			(void)fputs(literal ? "\n" : ".PP\n", out);
		else {
			print_escaped(text, n, out);
			(void)fputc('\n', out);
		}
		text += n + (text[n] == '\n');
	}
	if (literal)
		(void)fputs(".fi\n", out);
}

static void print_option(const struct cli_usage *usage, const struct cli_option *option, FILE *out)
{
	(void)fputs(".TP\n", out);
	if (cli_has_short(usage, option))
		(void)fprintf(out, "\\fB\\-%c\\fR, ", option->id);
	(void)fputs("\\fB\\-\\-", out);
	print_escaped(option->name, strlen(option->name), out);
	(void)fputs("\\fR", out);
	if (option->argument) {
		(void)fputs(" \\fI", out);
		print_escaped(option->argument, strlen(option->argument), out);
		(void)fputs("\\fR", out);
	}
	(void)fputc('\n', out);
	cli_print_roff(option->help, out);
}

static void print_options(const struct cli_usage *usage, bool standard, FILE *out)
{
	const struct cli_option *option;
	struct cli_cursor cursor = {0};

	while ((option = cli_each_option(usage, &cursor)))
		if (standard || cursor.standard == 0)
			print_option(usage, option, out);
}

static void print_synopsis(const struct cli_usage *usage, FILE *out)
{
	const char *form = usage->synopsis;

	(void)fputs(".nf\n", out);
	for (; form; form = strchr(form, '\n'), form += form != NULL) {
		(void)fputs("\\fB", out);
		print_escaped(usage->name, strlen(usage->name), out);
		(void)fputs("\\fR ", out);
		print_escaped(form, strcspn(form, "\n"), out);
		(void)fputc('\n', out);
	}
	(void)fputs(".fi\n", out);
}

static void print_command(const struct cli_usage *usage, FILE *out)
{
	const char *word = strrchr(usage->name, ' ');

	(void)fprintf(out, ".SS %s\n", word ? word + 1 : usage->name);
	print_synopsis(usage, out);
	(void)fputs(".PP\n", out);
	cli_print_roff(usage->text, out);
	print_options(usage, false, out);
}

static void print_page(const struct cli_program *program, FILE *out)
{
	(void)fputs(".SH SYNOPSIS\n", out);
	print_synopsis(program->usage, out);
	(void)fputs(".SH DESCRIPTION\n", out);
	cli_print_roff(program->usage->text, out);
	(void)fputs(".SH OPTIONS\n", out);
	print_options(program->usage, true, out);
	if (!program->commands)
		return;
	(void)fputs(".SH COMMANDS\n", out);
	for (size_t i = 0; program->commands[i]; i++)
		print_command(program->commands[i], out);
}

bool cli_document(const struct cli_program *program, const char *format, FILE *out)
{
	static const struct {
		const char *name;
		void (*print)(const struct cli_program *program, FILE *out);
	} formats[] = {{"man", print_page},
		       {"bash", cli_complete_bash},
		       {"zsh", cli_complete_zsh},
		       {"fish", cli_complete_fish}};

	for (size_t i = 0; i < sizeof(formats) / sizeof(formats[0]); i++) {
		if (strcmp(formats[i].name, format) != 0)
			continue;
		formats[i].print(program, out);
		return true;
	}
	return false;
}

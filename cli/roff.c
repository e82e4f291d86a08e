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

static void roff_print_table(const struct cli_usage *usage, const struct cli_option *table,
			     FILE *out)
{
	for (; table->name; table++)
		print_option(usage, table, out);
}

static bool has_table(const struct cli_usage *usage, const struct cli_option *table)
{
	for (int i = 0; i < CLI_TABLES && usage->tables[i]; i++)
		if (usage->tables[i] == table)
			return true;
	return false;
}

/* Of the program and of the commands before @end the first that has the table; NULL: none has. */
static const struct cli_usage *who_has(const struct cli_program *program,
				       const struct cli_usage *end, const struct cli_option *table)
{
	if (has_table(program->usage, table))
		return program->usage;
	for (size_t i = 0; program->commands[i] != end; i++)
		if (has_table(program->commands[i], table))
			return program->commands[i];
	return NULL;
}

static void print_synopsis(const struct cli_usage *usage, FILE *out)
{
	const char *form = usage->synopsis;

	(void)fputs(".nf\n", out);
	while (form) {
		(void)fputs("\\fB", out);
		print_escaped(usage->name, strlen(usage->name), out);
		(void)fputs("\\fR ", out);
		print_escaped(form, strcspn(form, "\n"), out);
		(void)fputc('\n', out);
		form = strchr(form, '\n');
		if (form)
			form++;
	}
	(void)fputs(".fi\n", out);
}

/* Options that have been described, by their names: "and --a, --b as of ping". */
static void print_known(const struct cli_option *table, const struct cli_usage *first,
			const struct cli_program *program, FILE *out)
{
	(void)fputs(".PP\n", out);
	for (const struct cli_option *option = table; option->name; option++) {
		(void)fputs(option > table ? ", \\fB\\-\\-" : "\\fB\\-\\-", out);
		print_escaped(option->name, strlen(option->name), out);
		(void)fputs("\\fR", out);
	}
	if (first == program->usage)
		(void)fputs(": see OPTIONS.\n", out);
	else
		(void)fprintf(out, ": as of \\fB%s\\fR.\n", cli_command_word(first));
}

static void print_command(const struct cli_program *program, const struct cli_usage *usage,
			  FILE *out)
{
	(void)fprintf(out, ".SS %s\n", cli_command_word(usage));
	print_synopsis(usage, out);
	(void)fputs(".PP\n", out);
	cli_print_roff(usage->text, out);
	for (int i = 0; i < CLI_TABLES && usage->tables[i]; i++)
		if (!who_has(program, usage, usage->tables[i]))
			roff_print_table(usage, usage->tables[i], out);
	for (int i = 0; i < CLI_TABLES && usage->tables[i]; i++) {
		const struct cli_usage *first = who_has(program, usage, usage->tables[i]);

		if (first)
			print_known(usage->tables[i], first, program, out);
	}
}

static void print_page(const struct cli_program *program, FILE *out)
{
	(void)fputs(".SH SYNOPSIS\n", out);
	print_synopsis(program->usage, out);
	(void)fputs(".SH DESCRIPTION\n", out);
	cli_print_roff(program->usage->text, out);
	(void)fputs(".SH OPTIONS\n", out);
	for (int i = 0; i < CLI_TABLES && program->usage->tables[i]; i++)
		roff_print_table(program->usage, program->usage->tables[i], out);
	roff_print_table(program->usage, cli_standard, out);
	if (!program->commands)
		return;
	(void)fputs(".SH COMMANDS\n", out);
	for (size_t i = 0; program->commands[i]; i++)
		print_command(program, program->commands[i], out);
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

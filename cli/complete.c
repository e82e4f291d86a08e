/* SPDX-License-Identifier: MIT */
/* complete.c: a program's options and commands as completion for shells. */
#include "tables.h"

#include <string.h>

enum value_kind { VALUE_NONE, VALUE_WORDS, VALUE_FILE, VALUE_LISTED, VALUE_OTHER };

static bool names_file(const char *argument)
{
	return strstr(argument, "FILE") || strstr(argument, "PATH") || strstr(argument, "DIR");
}

static enum value_kind kind_of(const struct cli_program *program, const char *argument)
{
	if (!argument)
		return VALUE_NONE;
	if (strchr(argument, '|'))
		return VALUE_WORDS;
	if (program->listed && strcmp(argument, program->listed) == 0)
		return VALUE_LISTED;
	return names_file(argument) ? VALUE_FILE : VALUE_OTHER;
}

/* a|b|C as "a b ". */
static void print_words(const char *words, FILE *out)
{
	for (; *words; words++)
		if (*words == '|')
			(void)fputc(' ', out);
		else if (*words != '[' && *words != ']' && (*words < 'A' || *words > 'Z'))
			(void)fputc(*words, out);
}

/* What prints the values that are listed, for a shell as sh is one. */
static void print_lister(const struct cli_program *program, FILE *out)
{
	(void)fprintf(out, "$(%s 2>/dev/null | sed \"s/ .*//\")", program->lister);
}

/* ---- bash ---- */

/* @commands: offered besides; NULL: none */
static void bash_words(const struct cli_program *program, const struct cli_usage *usage,
		       const struct cli_usage *const *commands, FILE *out)
{
	const struct cli_option *option;
	struct cli_cursor cursor = {0};

	(void)fputs("words='", out);
	while ((option = cli_each_option(usage, &cursor)))
		(void)fprintf(out, "--%s ", option->name);
	if (kind_of(program, usage->operands) == VALUE_WORDS)
		print_words(usage->operands, out);
	for (; commands && *commands; commands++)
		(void)fprintf(out, "%s ", cli_command_word(*commands));
	(void)fputs("'\n", out);
	if (kind_of(program, usage->operands) == VALUE_FILE)
		(void)fputs("        files=1\n", out);
	cursor = (struct cli_cursor){0};
	(void)fputs("        case $prev in\n", out);
	while ((option = cli_each_option(usage, &cursor))) {
		enum value_kind kind = kind_of(program, option->argument);

		if (kind == VALUE_NONE)
			continue;
		(void)fprintf(out, "        --%s", option->name);
		if (cli_has_short(usage, option))
			(void)fprintf(out, " | -%c", option->id);
		(void)fputs(") words=", out);
		if (kind == VALUE_LISTED) {
			print_lister(program, out);
		} else {
			(void)fputc('\'', out);
			if (kind == VALUE_WORDS)
				print_words(option->argument, out);
			(void)fputc('\'', out);
		}
		(void)fprintf(out, " files=%s ;;\n", names_file(option->argument) ? "1" : "");
	}
	(void)fputs("        esac\n", out);
}

void cli_complete_bash(const struct cli_program *program, FILE *out)
{
	const char *name = program->usage->name;

	(void)fprintf(out,
		      "# Completion of %s for bash.\n"
		      "_%s() {\n"
		      "    local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD - 1]}\n"
		      "    local command= words= files= i\n",
		      name, name);
	if (program->commands) {
		(void)fputs("    for ((i = 1; i < COMP_CWORD; i++)); do\n"
			    "        case ${COMP_WORDS[i]} in\n",
			    out);
		for (size_t i = 0; program->commands[i]; i++)
			(void)fprintf(out, "        %s%s", i ? "| " : "",
				      cli_command_word(program->commands[i]));
		(void)fputs(") command=${COMP_WORDS[i]}; break ;;\n"
			    "        esac\n"
			    "    done\n",
			    out);
	}
	(void)fputs("    case $command in\n", out);
	for (size_t i = 0; program->commands && program->commands[i]; i++) {
		(void)fprintf(out, "    %s)\n        ", cli_command_word(program->commands[i]));
		bash_words(program, program->commands[i], NULL, out);
		(void)fputs("        ;;\n", out);
	}
	(void)fputs("    *)\n        ", out);
	bash_words(program, program->usage, program->commands, out);
	(void)fprintf(
		out,
		"        ;;\n"
		"    esac\n"
		"    mapfile -t COMPREPLY < <(compgen -W \"$words\" ${files:+-f} -- \"$cur\")\n"
		"}\n"
		"complete -F _%s %s\n",
		name, name);
}

/* ---- zsh ---- */

/* Inside '...' of an _arguments specification. */
static void zsh_escaped(const char *text, FILE *out)
{
	for (; *text; text++) {
		if (*text == '\'')
			(void)fputs("'\\''", out);
		else if (strchr("[]:\\", *text))
			(void)fprintf(out, "\\%c", *text);
		else
			(void)fputc(*text, out);
	}
}

static void zsh_value(const struct cli_program *program, const char *argument, FILE *out)
{
	switch (kind_of(program, argument)) {
	case VALUE_NONE:
		break;
	case VALUE_WORDS:
		(void)fputs(":word:(", out);
		print_words(argument, out);
		(void)fputc(')', out);
		break;
	case VALUE_FILE:
		(void)fputs(":file:_files", out);
		break;
	case VALUE_LISTED:
		(void)fputs(":value:{compadd -- ", out);
		print_lister(program, out);
		(void)fputc('}', out);
		break;
	case VALUE_OTHER:
		(void)fputs(":value: ", out);
		break;
	}
}

static void zsh_arguments(const struct cli_program *program, const struct cli_usage *usage,
			  FILE *out)
{
	const struct cli_option *option;
	struct cli_cursor cursor = {0};

	(void)fputs("_arguments", out);
	while ((option = cli_each_option(usage, &cursor))) {
		(void)fprintf(out, " \\\n            '--%s[", option->name);
		zsh_escaped(option->help, out);
		(void)fputc(']', out);
		zsh_value(program, option->argument, out);
		(void)fputc('\'', out);
	}
	if (usage->operands) {
		(void)fputs(" \\\n            '1", out);
		zsh_value(program, usage->operands, out);
		(void)fputc('\'', out);
	}
	(void)fputc('\n', out);
}

void cli_complete_zsh(const struct cli_program *program, FILE *out)
{
	const char *name = program->usage->name;

	(void)fprintf(out, "#compdef %s\n# Completion of %s for zsh.\n_%s() {\n", name, name, name);
	if (!program->commands) {
		(void)fputs("        ", out);
		zsh_arguments(program, program->usage, out);
		(void)fprintf(out, "}\n_%s \"$@\"\n", name);
		return;
	}
	(void)fputs("    local i command=\n"
		    "    local -a commands=(\n",
		    out);
	for (size_t i = 0; program->commands[i]; i++) {
		(void)fprintf(out, "        '%s:", cli_command_word(program->commands[i]));
		zsh_escaped(program->commands[i]->brief, out);
		(void)fputs("'\n", out);
	}
	(void)fputs("    )\n"
		    "    for ((i = 2; i < CURRENT; i++)); do\n"
		    "        if (( ${commands[(I)${words[i]}:*]} )); then\n"
		    "            command=${words[i]}\n"
		    "            shift $((i - 1)) words\n"
		    "            ((CURRENT -= i - 1))\n"
		    "            break\n"
		    "        fi\n"
		    "    done\n"
		    "    case $command in\n",
		    out);
	for (size_t i = 0; program->commands[i]; i++) {
		(void)fprintf(out, "    %s)\n        ", cli_command_word(program->commands[i]));
		zsh_arguments(program, program->commands[i], out);
		(void)fputs("        ;;\n", out);
	}
	(void)fprintf(out,
		      "    *)\n"
		      "        _describe command commands\n"
		      "        ;;\n"
		      "    esac\n"
		      "}\n"
		      "_%s \"$@\"\n",
		      name);
}

/* ---- fish ---- */

static void fish_quoted(const char *text, FILE *out)
{
	(void)fputc('\'', out);
	for (; *text; text++) {
		if (*text == '\'' || *text == '\\')
			(void)fputc('\\', out);
		(void)fputc(*text, out);
	}
	(void)fputc('\'', out);
}

static void fish_value(const struct cli_program *program, const char *argument, FILE *out)
{
	switch (kind_of(program, argument)) {
	case VALUE_NONE:
		break;
	case VALUE_WORDS:
		(void)fputs(names_file(argument) ? " -r -F -a '" : " -x -a '", out);
		print_words(argument, out);
		(void)fputc('\'', out);
		break;
	case VALUE_FILE:
		(void)fputs(" -r -F", out);
		break;
	case VALUE_LISTED:
		(void)fprintf(out, " -x -a '(%s 2>/dev/null | string split -f1 \" \")'",
			      program->lister);
		break;
	case VALUE_OTHER:
		(void)fputs(" -x", out);
		break;
	}
}

/* @condition: when these are offered; NULL: always. */
static void fish_options(const struct cli_program *program, const struct cli_usage *usage,
			 const char *condition, FILE *out)
{
	const struct cli_option *option;
	struct cli_cursor cursor = {0};

	while ((option = cli_each_option(usage, &cursor))) {
		(void)fprintf(out, "complete -c %s", program->usage->name);
		if (condition)
			(void)fprintf(out, " -n '%s %s'", condition, cli_command_word(usage));
		if (cli_has_short(usage, option))
			(void)fprintf(out, " -s %c", option->id);
		(void)fprintf(out, " -l %s", option->name);
		fish_value(program, option->argument, out);
		(void)fputs(" -d ", out);
		fish_quoted(option->help, out);
		(void)fputc('\n', out);
	}
	if (!usage->operands)
		return;
	(void)fprintf(out, "complete -c %s -n '%s %s'", program->usage->name,
		      condition ? condition : "true", cli_command_word(usage));
	fish_value(program, usage->operands, out);
	(void)fputc('\n', out);
}

void cli_complete_fish(const struct cli_program *program, FILE *out)
{
	const char *name = program->usage->name;

	(void)fprintf(out, "# Completion of %s for fish.\n", name);
	if (!program->commands) {
		fish_options(program, program->usage, NULL, out);
		return;
	}
	(void)fprintf(out, "complete -c %s -f\n", name);
	for (size_t i = 0; program->commands[i]; i++) {
		(void)fprintf(out, "complete -c %s -n __fish_use_subcommand -a %s -d ", name,
			      cli_command_word(program->commands[i]));
		fish_quoted(program->commands[i]->brief, out);
		(void)fputc('\n', out);
		fish_options(program, program->commands[i], "__fish_seen_subcommand_from", out);
	}
}

# Fills the template of a manual page: -DTEMPLATE, -DOUT, -DVERSION, -DDATE, -DCOMMAND with the command whose output
# becomes @OPTIONS@.
cmake_minimum_required(VERSION 3.25)
execute_process(
  COMMAND ${COMMAND}
  OUTPUT_VARIABLE OPTIONS
  OUTPUT_STRIP_TRAILING_WHITESPACE
  COMMAND_ERROR_IS_FATAL ANY)
file(READ ${TEMPLATE} page)
string(REPLACE "@VERSION@" "${VERSION}" page "${page}")
string(REPLACE "@DATE@" "${DATE}" page "${page}")
string(REPLACE "@OPTIONS@" "${OPTIONS}" page "${page}")
# Two breaks of a paragraph in a row are one; one before a heading is none.
string(REGEX REPLACE "(\n\\.PP)+(\n\\.(PP|SH|SS|TP|IP|nf))" "\\2" page "${page}")
string(REGEX REPLACE "(\n\\.(SH|SS)[^\n]*)(\n\\.PP)+\n" "\\1\n" page "${page}")
file(WRITE ${OUT} "${page}")

# bash completion for sonde: commands, their long options as --help prints them, then files.
_sonde() {
  local word=${COMP_WORDS[COMP_CWORD]} command=${COMP_WORDS[1]} words
  if [ "$COMP_CWORD" -eq 1 ]; then
    words="record report list stack check dump --help --version"
  elif [ "${word:0:1}" = - ]; then
    words=$("${COMP_WORDS[0]}" "$command" --help 2>/dev/null | grep -oE -- '--[a-z][a-z-]*' | sort -u)
  fi
  mapfile -t COMPREPLY < <(compgen -W "${words:-}" -- "$word")
  [ ${#COMPREPLY[@]} -gt 0 ] || mapfile -t COMPREPLY < <(compgen -f -- "$word")
}
complete -o filenames -F _sonde sonde

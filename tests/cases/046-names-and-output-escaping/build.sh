clang++ -O1 -g -o out/case case.cc

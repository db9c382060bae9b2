g++ -O2 -g -freorder-blocks-and-partition -fipa-sra -fpartial-inlining -o out/case case.cc
clang++ -O2 -g -o out/case_clang case.cc
# The case is void if the compiler made no clones.
for kind in cold constprop isra; do nm out/case | grep -q "\.$kind"; done

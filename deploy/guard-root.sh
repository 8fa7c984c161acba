#!/bin/sh
# Copies Python, the guard and the libraries of both to an empty root: sh guard-root.sh FOLDER
set -eu
root=$1
library=$(python3 -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')
mkdir -p "$root/etc"
mkdir -m 1777 "$root/tmp"
cd /
cp -a --parents usr/bin/python3* "${library#/}" opt/outrider "$root"
# What installs and shows packages, and windows, is not used there.
cd "$root$library"
rm -rf ensurepip lib2to3 distutils pydoc_data idlelib tkinter test config-*
# Libraries lie where the loader looks for them: /lib is a link to /usr/lib in some systems.
find "$root/usr" "$root/opt" -type f \( -name '*.so*' -o -name 'python3.*' \) -exec ldd {} + 2>/dev/null |
  grep -o '/[^ ]*' | grep -v ':$' | sort -u | while read -r file; do
    mkdir -p "$root$(dirname "$file")"
    cp -L "$file" "$root$file"
  done
echo "outrider:x:10001:10001::/tmp:/" > "$root/etc/passwd"
echo "outrider:x:10001:" > "$root/etc/group"
# Names first in the file that Kubernetes writes, then in DNS.
echo "hosts: files dns" > "$root/etc/nsswitch.conf"
